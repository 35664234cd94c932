"""Weights that fade without being touched, and a half-life that is learned."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.policy.reuse import HALF_LIFE_PER_GAP, ReuseClock, weight_of_new


def test_a_hit_counts_half_after_a_half_life() -> None:
    clock = ReuseClock(10.0)
    weight = clock.value_of_hit(0.0) + clock.value_of_hit(10.0)
    assert clock.faded(weight, 10.0) == pytest.approx(1.5)
    assert clock.faded(weight, 30.0) == pytest.approx(1.5 / 4)


@pytest.mark.parametrize("half_life_s", [0.0, -1.0, float("nan")])
def test_a_half_life_must_be_above_0(half_life_s: float) -> None:
    with pytest.raises(ValueError, match="seconds above 0"):
        ReuseClock(half_life_s)


@given(
    weights=st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 100.0)), min_size=2, max_size=20),
    later=st.floats(0.0, 1000.0),
)
def test_with_one_half_life_a_new_epoch_reorders_nothing(weights: list[tuple[float, float]], later: float) -> None:
    """Not even nodes of nearly equal weight that were last used at different times."""
    weights += [(weight * (1.0 + 1e-15), last_use_s / 3.0) for weight, last_use_s in weights]
    clock = ReuseClock(7.0)
    now_s = 100.0 + later
    before = [clock.faded(weight, now_s) for weight, _ in weights]
    restate = clock.rebase(now_s)
    restated = [restate(weight, last_use_s) for weight, last_use_s in weights]
    assert clock.value_of_hit(now_s) == 1.0
    assert restated == pytest.approx(before)
    for (one, new_one), (other, new_other) in itertools.combinations(
        [(weight, new) for (weight, _), new in zip(weights, restated, strict=True)], 2
    ):
        assert (one <= other) <= (new_one <= new_other)


def test_a_server_that_runs_for_ever_never_overflows() -> None:
    clock = ReuseClock(0.1)
    weight = last_use_s = now_s = 0.0
    for _ in range(2000):
        now_s += 7.0
        if clock.is_due(now_s):
            weight = clock.rebase(now_s)(weight, last_use_s)
        weight, last_use_s = weight + clock.value_of_hit(now_s), now_s
        assert clock.faded(weight, now_s) == pytest.approx(1.0)


def test_the_half_life_follows_the_gaps_by_tokens() -> None:
    clock, rng = ReuseClock(None), random.Random(3)
    for _ in range(64):
        clock.observe_reuse(rng.uniform(39.0, 41.0), 1000)
        clock.observe_reuse(0.5, 10)  # short prefixes come back sooner, and are little to lose
    assert clock.is_due(100.0)
    clock.rebase(100.0)
    assert clock.half_life_s == pytest.approx(40.0 * HALF_LIFE_PER_GAP, rel=0.05)
    assert not clock.is_due(200.0)


def test_a_half_life_that_was_given_is_kept() -> None:
    clock = ReuseClock(5.0)
    for _ in range(100):
        clock.observe_reuse(900.0, 1000)
    assert not clock.is_due(1.0) and clock.half_life_s == 5.0


def test_another_half_life_leaves_a_node_its_hits_at_its_last_use() -> None:
    clock = ReuseClock(None)
    weight = 3.0 * clock.value_of_hit(20.0)
    for _ in range(8):
        clock.observe_reuse(40.0, 100)
    restated = clock.rebase(50.0)(weight, 20.0)
    assert restated / clock.value_of_hit(20.0) == pytest.approx(3.0)


def test_a_new_node_shares_its_parents_reuse() -> None:
    assert weight_of_new(1.0, 8.0, 0) == 1.0
    assert weight_of_new(1.0, 8.0, 2) == 4.0
    assert weight_of_new(1.0, 8.0, 100) == 1.0
