"""Systems under load: every repetition by itself, the medians of them, and the rate up to which a system keeps up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import Cell, summarise

UNLOADED = 2.0
"""At most so many times the 95th percentile of TTFT with one client."""

LEAST_ANSWERED = 0.95
"""Of the requests offered: what a system answers that keeps up."""


def loaded(results: Results) -> list[Cell]:
    """Every run, by repetition, system and rate."""
    repetitions = sorted({run.repetition for run in results.runs})
    return [cell for repetition in repetitions for cell in summarise(results, repetition=repetition).cells]


def median(runs: Iterable[Cell]) -> list[Cell]:
    """One for each system and rate, in order, each figure the median of those that its repetitions know."""
    groups: dict[tuple[str, float], list[Cell]] = {}
    for run in runs:
        groups.setdefault((run.system, run.rate), []).append(run)
    return [replace(_median(group), repetition=None) for group in groups.values()]


def knee(rates: Sequence[Cell]) -> float | None:
    """The highest rate, in requests/s, at which a system keeps up: it answers what is offered, but for 5 %, with a 95th
    percentile of TTFT of at most twice that with one client; 0 where it does at none.

    ``rates`` are one system's, of one repetition. None without a rate of one client or one of an offered rate.
    """
    unloaded_s = next((each.ttft_p95_of_all_s for each in rates if each.rate == 0), None)
    offered = [each for each in rates if each.rate > 0]
    if unloaded_s is None or not offered:
        return None
    return max((each.rate for each in offered if _keeps_up(each, UNLOADED * unloaded_s)), default=0.0)


def _keeps_up(each: Cell, limit_s: float) -> bool:
    if each.completed_rps is None or each.offered_rps is None or each.ttft_p95_of_all_s is None:
        return False
    return each.completed_rps >= LEAST_ANSWERED * each.offered_rps and each.ttft_p95_of_all_s <= limit_s


def _median(values: Sequence[Any]) -> Any:
    """That of numbers; of what is made of them, part by part; the first of what is none."""
    known = [value for value in values if value is not None]
    first = known[0] if known else None
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for each in known for name in each)
        nested = any(isinstance(value, Mapping) for each in known for value in each.values())
        empty: Any = {} if nested else 0.0
        return {name: _median([each.get(name, empty) for each in known]) for name in names}
    if is_dataclass(first):
        parts = {field.name: _median([getattr(each, field.name) for each in known]) for field in fields(first)}
        return replace(first, **parts)  # type: ignore[type-var]
    return statistics.median(known) if isinstance(first, int | float) else first
