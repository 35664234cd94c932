"""Layer budgets: completed to a target, in a pyramid, and rounded to few counts."""

from __future__ import annotations

import random

import pytest

from sglang_evicpress.search.budget_file import BudgetFile
from sglang_evicpress.search.layer_budgets import complete, expanded, pyramid, round_counts, uniform


def test_completion_gives_every_layer_its_share_rounded_up() -> None:
    assert complete([100, 300], 100) == (50, 150)
    assert complete([1, 1, 1], 5) == (5, 5, 5)
    assert complete([3, 0, 4], 5) == (7, 0, 9)  # 45 / 7 and 60 / 7


@pytest.mark.parametrize("seed", range(20))
def test_completion_sums_to_the_target_or_a_little_more(seed: int) -> None:
    rng = random.Random(seed)
    budgets = [rng.randint(1, 500) for _ in range(rng.randint(1, 40))]
    target = rng.randint(1, 2000)
    assert target * len(budgets) <= sum(complete(budgets, target)) < (target + 1) * len(budgets)


def test_equal_budgets_stay_equal_and_are_those_of_a_uniform_form() -> None:
    assert complete(uniform(32, 77), 128) == uniform(32, 128)


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_a_file_give_back_what_they_were_made_of(seed: int) -> None:
    rng = random.Random(seed)
    budgets, target = [rng.randint(0, 500) for _ in range(rng.randint(1, 40))] + [1], rng.randint(1, 2000)
    shares = BudgetFile.of(budgets, target).shares
    assert expanded(shares, target) == complete(budgets, target)
    assert expanded(shares, 3 * target) == complete(budgets, 3 * target)


@pytest.mark.parametrize("budgets", [[], [0, 0], [5, -1]])
def test_budgets_that_cannot_be_completed_are_refused(budgets: list[int]) -> None:
    with pytest.raises(ValueError, match="expected none below 0 and one above"):
        complete(budgets, 5)


def test_a_pyramid_falls_in_equal_steps_from_twice_the_mean_to_a_twentieth() -> None:
    budgets = pyramid(5, 1000)
    assert budgets == (1950, 1475, 1000, 525, 50)
    assert pyramid(1, 64) == (64,)
    assert sum(pyramid(32, 128)) >= 32 * 128


def test_rounding_keeps_what_is_near_together_and_the_sum() -> None:
    assert round_counts([10, 11, 90, 92, 91], 2) == (10, 10, 91, 91, 91)
    assert round_counts([10, 11, 90, 92, 91], 5) == (10, 11, 90, 92, 91)
    assert round_counts([10, 11, 90, 92, 91], 1) == (58, 58, 58, 58, 58)
    assert round_counts(uniform(8, 5), 4) == uniform(8, 5)


@pytest.mark.parametrize("seed", range(20))
def test_rounding_never_asks_for_more_and_hardly_for_less(seed: int) -> None:
    rng = random.Random(seed)
    budgets = [rng.randint(1, 300) for _ in range(rng.randint(1, 24))]
    rounded = round_counts(budgets, 4)
    counts = set(rounded)
    fewest = min(rounded.count(count) for count in counts)
    assert len(counts) <= 4
    assert sum(budgets) - fewest < sum(rounded) <= sum(budgets)


def test_rounding_to_no_count_is_refused() -> None:
    with pytest.raises(ValueError, match="most_counts is 0"):
        round_counts([1, 2], 0)
