"""Evidence is the same however it was gathered, and its lower bound is one."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.quality.running_stats import PRIOR_COUNT, RunningStats

qualities = st.lists(st.floats(0.0, 1.0), max_size=30)


@given(qualities)
def test_evidence_has_the_count_mean_and_variance_of_what_was_observed(values: list[float]) -> None:
    seen = RunningStats.of(values)
    assert seen.count == len(values)
    if values:
        assert seen.mean == pytest.approx(statistics.fmean(values), abs=1e-12)
        assert 0.0 <= seen.mean <= 1.0
    if len(values) > 1:
        assert seen.variance == pytest.approx(statistics.variance(values), abs=1e-12)
    else:
        assert seen.variance == 0.0


@given(qualities, qualities)
def test_two_parts_are_together_what_the_whole_is(one: list[float], other: list[float]) -> None:
    together, whole = RunningStats.of(one).plus(RunningStats.of(other)), RunningStats.of(one + other)
    assert together.count == whole.count
    assert together.mean == pytest.approx(whole.mean, abs=1e-12)
    assert together.squares == pytest.approx(whole.squares, abs=1e-9)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30), st.floats(1.5, 40.0))
def test_aged_evidence_keeps_mean_and_variance_and_counts_for_at_most_so_much(
    values: list[float], max_count: float
) -> None:
    seen = RunningStats.of(values)
    aged = seen.aged(max_count)
    assert aged.count == min(len(values), max_count)
    assert aged.mean == seen.mean
    assert aged.variance == pytest.approx(seen.variance, abs=1e-12)


def test_newer_evidence_outweighs_older_once_that_is_aged() -> None:
    old, new = RunningStats.of([0.2] * 100), RunningStats.of([0.8] * 4)
    assert new.plus(old).mean < 0.25
    assert new.plus(old.aged(4)).mean == pytest.approx(0.5)


def test_one_observation_of_many_is_left_without_a_spread() -> None:
    assert RunningStats.of([0.0, 1.0]).aged(1.0) == RunningStats(1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("values", "variance", "expected"),
    [
        ([0.5], 0.0, 0.5),
        ([0.5], 0.04, 0.5 - 0.2),  # one alone is as uncertain as such a number is
        ([0.4, 0.6], 0.0, 0.5 - math.sqrt(0.02 / 3 / 2)),
        ([0.4, 0.6], 0.04, 0.5 - math.sqrt((0.02 + 0.08) / 3 / 2)),
        ([1.0, 1.0, 1.0, 1.0], 0.0, 1.0),
    ],
)
def test_lower_bound_is_one_standard_error_below_the_mean(
    values: list[float], variance: float, expected: float
) -> None:
    assert PRIOR_COUNT == 2.0
    assert RunningStats.of(values).lower_bound(variance) == pytest.approx(expected)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.floats(0.0, 0.25), st.floats(0.0, 0.25))
def test_lower_bound_falls_with_the_variance_and_rises_with_repetition(
    values: list[float], one: float, other: float
) -> None:
    seen = RunningStats.of(values)
    low, high = sorted((one, other))
    assert seen.lower_bound(high) <= seen.lower_bound(low) <= seen.mean
    assert RunningStats.of(values * 4).lower_bound(low) >= seen.lower_bound(low) - 1e-12


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_four_of_five_lower_bounds_hold(count: int) -> None:
    """For a spread that is as expected; when qualities crowd at 1, somewhat fewer of those of few observations."""
    draw = np.random.default_rng(count)
    rows = draw.normal(0.6, 0.2, (4000, count))
    held = np.mean([RunningStats.of(row.tolist()).lower_bound(0.04) <= 0.6 for row in rows])
    assert 0.8 < held < 0.88


def test_lower_bound_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was observed"):
        RunningStats().lower_bound(0.05)


@pytest.mark.parametrize(
    "figures",
    [(-1.0, 0.5, 0.0), (math.nan, 0.5, 0.0), (math.inf, 0.5, 0.0), (1.0, math.nan, 0.0), (2.0, 0.5, -0.1)],
)
def test_impossible_evidence_is_refused(figures: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        RunningStats(*figures)
    with pytest.raises(ValueError, match="expected finite"):
        RunningStats.of([0.5, math.inf])
