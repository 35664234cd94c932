"""`make show-bench`: every system side by side on real servers, and every promise of serving; one line each.

Ends with status 1 if a line is MISSED. Takes at most 60 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. Runs that are there already are not made again: `rm -r bench/out/serve/show` begins anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from foundation.report import Line
from lines import run_parts


def measure_systems() -> Iterator[Line]:
    from serving.promises import measure

    return measure()


def measure_overhead() -> Iterator[Line]:
    from serving.unloaded import measure

    return measure()


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, {"systems": measure_systems, "overhead": measure_overhead}))
