"""Measurements of `make show-budgets`: the committed files of `configs/budgets` on questions never searched on, one
search made anew, and real servers with them. One thread: contexts are small, and side by side in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from evicbench.budgets.clusters import measure_clusters
from evicbench.budgets.heads import measure_heads
from evicbench.budgets.layers import (
    measure_expanded,
    measure_found,
    measure_other_tasks,
    measure_search,
    measure_seeds,
)
from evicbench.budgets.serving import measure_serving
from evicbench.budgets.windows import measure_windows
from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line, Measure, Measurement, unjudged

TESTS = (
    ("equations 1 and 2, groups, completion, a planted optimum", ("tests/unit/search",)),
    ("answers over uneven survivors: those of a mask per layer and head", ("tests/unit/profiler/local",)),
    ("slots shared by heads", ("tests/unit/press/test_layers.py",)),
)
QUICK_CONTEXTS = 32


def measure_tests(tests: Sequence[tuple[str, tuple[str, ...]]] = TESTS) -> Iterator[Line]:
    for what, chosen in tests:
        yield verdict(f"{what}: {chosen[0]}", "all hold", together(run_tests(*chosen), ""))


def one_thread(measure: Measure) -> Measure:
    def lines() -> Iterator[Line]:
        torch.set_num_threads(1)
        yield from measure()

    return lines


def _sized(measure: Measure, quick: Measure) -> Measurement:
    return Measurement(one_thread(measure), unjudged(one_thread(quick)))


MEASUREMENTS = {
    "tests": Measurement(measure_tests, partial(measure_tests, TESTS[:1])),
    "found": _sized(measure_found, partial(measure_found, QUICK_CONTEXTS)),
    "expanded": _sized(measure_expanded, partial(measure_expanded, QUICK_CONTEXTS)),
    "seeds": _sized(measure_seeds, partial(measure_seeds, QUICK_CONTEXTS)),
    "search": _sized(measure_search, partial(measure_search, QUICK_CONTEXTS, 2)),
    "other-tasks": Measurement(one_thread(measure_other_tasks)),
    "question-window": Measurement(one_thread(measure_windows)),
    "heads": Measurement(one_thread(measure_heads)),
    "clusters": Measurement(one_thread(measure_clusters)),
    "serving": Measurement(measure_serving),
}
