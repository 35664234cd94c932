"""Profiling touches few of users' steps, whatever they do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.quality.throttle import Throttle

FULL = 32


def test_a_user_who_waits_goes_first() -> None:
    assert Throttle().allowance(0, 1, 8) == 0


def test_nothing_is_added_to_a_full_batch() -> None:
    throttle = Throttle()
    for _ in range(130):
        throttle.user_step()
    assert (throttle.allowance(8, 0, 8), throttle.allowance(9, 0, 8), throttle.allowance(7, 0, 8)) == (0, 0, 256)


def test_without_users_credit_does_not_count() -> None:
    throttle = Throttle(max_step_tokens=100)
    for _ in range(5):
        throttle.took_part()
    assert throttle.allowance(0, 0, FULL) == 100


def test_with_users_one_step_in_128_is_given() -> None:
    """To what ends in the step that it begins in, and comes one at a time."""
    throttle, given_at = Throttle(), []
    for step in range(1, 400):
        throttle.user_step()
        if throttle.credit >= 1.0:
            assert throttle.allowance(1, 0, FULL)
            given_at.append(step)
            throttle.took_part()
    assert given_at == [128, 256, 384]


def rich() -> Throttle:
    """A pacer on a full credit."""
    throttle = Throttle()
    for _ in range(128):
        throttle.user_step()
    return throttle


def test_more_may_join_from_step_to_step_until_the_debt_is_full() -> None:
    throttle, num_joined = rich(), 0
    while throttle.allowance(1, 0, FULL):
        throttle.took_part(in_own_batch=True)
        num_joined += 1
        throttle.user_step()
        assert num_joined < 1000
    assert not throttle.may_go_on and num_joined == pytest.approx(throttle.max_debt * 128 / 127, abs=2)


def test_users_decode_between_two_batches_of_profiling_and_who_does_not_join_at_once_waits_for_credit() -> None:
    throttle = rich()
    throttle.took_part(in_own_batch=True)
    may_join = [throttle.allowance(1, 0, FULL) > 0]
    for _ in range(2):
        throttle.user_step()
        may_join.append(throttle.allowance(1, 0, FULL) > 0)
    assert may_join == [False, True, False]


def test_what_runs_in_a_gap_opens_no_door_when_users_come() -> None:
    throttle = Throttle()
    throttle.user_step()
    assert throttle.allowance(0, 0, FULL) > 0
    assert throttle.allowance(1, 0, FULL) == 0 and not throttle.may_go_on


def test_a_long_time_without_profiling_saves_up_one_step_only() -> None:
    throttle = Throttle()
    for _ in range(10_000):
        throttle.user_step()
    assert throttle.credit == 1.0


def test_a_generation_that_decodes_along_is_paid_for_afterwards() -> None:
    throttle = Throttle(per_step=0.25)
    for _ in range(4):
        throttle.user_step()
    for _ in range(10):
        throttle.user_step()
        throttle.took_part()
    for _ in range(2):  # without it: what begins next needs credit again
        throttle.user_step()
    num_steps = 2
    while not throttle.allowance(1, 0, FULL):
        throttle.user_step()
        num_steps += 1
    assert num_steps == 4 * 10 - 9  # the first of the ten found credit full, the others earned while they cost


def test_one_generation_of_as_many_tokens_as_may_be_owed_always_ends() -> None:
    throttle = rich()
    for _ in range(throttle.max_debt):
        assert throttle.may_go_on
        throttle.user_step()
        throttle.took_part()
    for _ in range(3):
        throttle.user_step()
        throttle.took_part()
    assert not throttle.may_go_on


@pytest.mark.parametrize(
    "figures",
    [{"per_step": 0.0}, {"per_step": 1.1}, {"per_step": float("nan")}, {"max_step_tokens": 0}, {"max_debt": -1}],
)
def test_figures_out_of_range_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Throttle(**figures)  # type: ignore[arg-type]


@given(
    per_step=st.sampled_from([1 / 128, 0.1, 0.25, 1.0]),
    max_debt=st.integers(0, 40),
    longest=st.integers(1, 60),
    minutes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(1, 80)), max_size=60),
)
def test_few_steps_of_users_are_touched(
    per_step: float, max_debt: int, longest: int, minutes: list[tuple[int, int, int]]
) -> None:
    """A scheduler that begins a generation whenever it may, gaps between users included, in batches of its own."""
    throttle = Throttle(per_step=per_step, max_debt=max_debt)
    num_steps = num_touched = num_left = 0
    for num_running, num_waiting, num_times in minutes:
        for _ in range(num_times):
            if num_running and not throttle.may_go_on:
                num_left = 0
            if throttle.allowance(num_running, num_waiting, 5):
                assert num_waiting == 0 and num_running < 5
                num_left = longest
                if num_running:
                    num_touched += 1
                    throttle.took_part(in_own_batch=True)
                    assert not throttle.allowance(num_running, num_waiting, 5)
            elif num_running:
                num_steps += 1
                throttle.user_step()
                if num_left:
                    num_touched += 1
                    throttle.took_part()
            num_left = max(0, num_left - 1)
            assert num_touched <= per_step * num_steps + max_debt + 1
