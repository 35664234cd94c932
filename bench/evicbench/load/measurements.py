"""Measurements of `make show-load`: a short look at one setting, chaos at twice saturation, the published lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from evicbench.load import grid
from evicbench.load.published import newest, published_lines
from evicbench.load.targets import Grid, one_client_ratio
from evicbench.report import Line, Measurement
from evicbench.tiers.chaos import NUM_QUESTIONS, lines, storm

SHOW = "load-show"
OUTSIDE = "load-outside"
"""The published setting that the short one is of."""

MOST_SLOWER = 1.15
"""One client beside the published figure: 80 requests have a mean that is off by some percent."""

CHAOS_S = 60.0


def measure_setting() -> Iterator[Line]:
    return grid.measure(SHOW)


def measure_one_client() -> Iterator[Line]:
    found = newest()
    now = one_client_ratio(Grid.of(grid.finished(SHOW)))
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


def measure_chaos(seconds: float = CHAOS_S, num_questions: int = NUM_QUESTIONS) -> Iterator[Line]:
    outcome = storm(seconds, overload=2.0, num_questions=num_questions)
    found = lines(outcome, seconds)
    yield found[0]
    yield found[1] if seconds >= CHAOS_S else replace(found[1], ok=None)  # not every fault happens in less time


MEASUREMENTS = {
    "settings": Measurement(measure_setting),
    "one client": Measurement(measure_one_client),
    "chaos": Measurement(measure_chaos, partial(measure_chaos, 6.0, 16)),
    "published": Measurement(published_lines),
}
