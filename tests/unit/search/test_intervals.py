"""Paired intervals: contexts are the units, and 95 % of them hold the truth."""

from __future__ import annotations

import math
import random

import pytest

from sglang_evicpress.search.intervals import paired_interval


def test_one_question_a_context_is_the_textbook_interval() -> None:
    differences = [0.1 * (number % 5) for number in range(50)]
    mean, low, high = paired_interval([[each] for each in differences], [[0.0]] * 50)
    spread = math.sqrt(sum((each - 0.2) ** 2 for each in differences) / 49)
    assert mean == pytest.approx(0.2)
    assert high - mean == pytest.approx(2.0096 * spread / math.sqrt(50), rel=1e-4)  # t of 49 degrees of freedom
    assert mean - low == pytest.approx(high - mean)


def test_the_same_questions_asked_twice_are_no_more_evidence() -> None:
    scores = [[float(number % 3)] for number in range(40)]
    once = paired_interval(scores, [[0.5]] * 40)
    assert paired_interval([row * 4 for row in scores], [[0.5] * 4] * 40) == pytest.approx(once)


@pytest.mark.parametrize("num_contexts", [6, 30])
def test_95_percent_of_the_intervals_hold_the_truth(num_contexts: int) -> None:
    rng = random.Random(num_contexts)
    num_right = 0
    for _ in range(1000):
        scores = list[list[float]]()
        for _ in range(num_contexts):
            shared = rng.gauss(0.3, 0.2)
            scores.append([rng.gauss(shared, 0.1) for _ in range(3)])
        _, low, high = paired_interval(scores, [[0.0] * 3] * num_contexts)
        num_right += low <= 0.3 <= high
    assert 925 <= num_right <= 975


def test_few_contexts_have_no_interval() -> None:
    assert paired_interval([[1.0]] * 5, [[0.5]] * 5) == (0.5, -math.inf, math.inf)


@pytest.mark.parametrize("others", [[[1.0]], [[1.0], [1.0, 2.0]]])
def test_scores_of_other_questions_are_refused(others: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="of other questions"):
        paired_interval([[1.0], [1.0]], others)
