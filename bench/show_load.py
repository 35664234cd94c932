"""`make show-load`: a short look at one setting under load, chaos at twice saturation, and the published lines.

Ends with status 1 if a line is MISSED. Takes at most 40 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. Runs that are there already are not made again: `rm -r bench/out/serve/load-show` begins anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from foundation.report import Line
from lines import run_parts
from load.published import newest, published_lines

SHOW = "load-show"
OUTSIDE = "load-outside"
"""The published setting that the short one is of."""

MOST_SLOWER = 1.15
"""One client beside the published figure: 80 requests have a mean that is off by some percent."""

CHAOS_S = 60.0


def measure_setting() -> Iterator[Line]:
    from load.grid import measure

    return measure(SHOW)


def measure_one_client() -> Iterator[Line]:
    from load.grid import finished
    from load.promises import Grid, one_client_ratio

    found = newest()
    now = one_client_ratio(Grid.of(finished(SHOW)))
    yield beside_published(now, None if found is None else published_ratio(found.lines))


def beside_published(now: float | None, before: float | None) -> Line:
    """One client, as a ratio to exact LRU over the same tiers on the same machine."""
    what = "one client, mean TTFT over that of exact LRU over the same tiers, beside the published ratio"
    target = f"<= {MOST_SLOWER:g}x it"
    if now is None or before is None:
        return Line(what, target, "not measured" if now is None else "none is published", False)
    return Line(what, target, f"{now / before:.2f}x: {now:.3f} against {before:.3f}", now <= MOST_SLOWER * before)


def published_ratio(lines: tuple[Line, ...]) -> float | None:
    for line in lines:
        if line.what.startswith(f"{OUTSIDE}: one client") and (found := re.match(r"([0-9.]+)x", line.figure)):
            return float(found.group(1))
    return None


def measure_chaos() -> Iterator[Line]:
    from tiers.chaos import lines, storm

    outcome = storm(CHAOS_S, overload=2.0)
    for problem in outcome.problems[:40]:
        print(f"    {problem}", flush=True)
    yield from lines(outcome, CHAOS_S)


PARTS = {
    "setting": measure_setting,
    "one client": measure_one_client,
    "chaos": measure_chaos,
    "published": published_lines,
}

if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
