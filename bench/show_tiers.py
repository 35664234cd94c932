"""`make show-tiers`: measures every promise of the tiers that a machine without a GPU can; one line each.

Ends with status 1 if a line is MISSED. Takes at most 30 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. Files are written to the folder EVICPRESS_SSD or, where that is not set, to bench/out: name a folder on
the disk that is meant; it needs 4 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from foundation.report import Line
from lines import run_parts
from tiers.bandwidth import measure_bandwidth
from tiers.chaos import measure_chaos
from tiers.fragmentation import measure_fragmentation
from tiers.host import measure_host
from tiers.identical import measure_identical
from tiers.index import measure_index
from tiers.kills import measure_kills
from tiers.restart import measure_restart
from tiers.roundtrip import measure_roundtrip
from tiers.ttft import measure_ttft


def parts() -> dict[str, Callable[[], Iterator[Line]]]:
    """Quick ones first; those that start a server last."""
    return {
        "roundtrip": measure_roundtrip,
        "bandwidth": measure_bandwidth,
        "host": measure_host,
        "fragmentation": measure_fragmentation,
        "index": measure_index,
        "kills": measure_kills,
        "ttft": measure_ttft,
        "restart": measure_restart,
        "identical": measure_identical,
        "chaos": measure_chaos,
    }


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, parts()))
