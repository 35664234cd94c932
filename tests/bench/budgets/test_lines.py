"""Lines of `make show-budgets`: what is the better rival, which groups there are, and when a line is missed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from evicbench.budgets import layers
from evicbench.budgets.clusters import grouped, nearest
from evicbench.budgets.comparisons import Difference, better
from evicbench.budgets.questions import Questions, Scores, mean
from evicbench.budgets.searches import SEARCHED_ON, TARGETS, all_searches, committed

NUM_CONTEXTS = 40


def scores_of(value: float) -> Scores:
    """Means of ``value``, a little different from context to context."""
    return [[value + 0.01 * (number % 3 - 1)] * 2 for number in range(NUM_CONTEXTS)]


def test_the_better_rival_has_the_larger_mean() -> None:
    scores = {"uniform 64": scores_of(0.5), "pyramid 64": scores_of(0.6), "found 64": scores_of(0.9)}
    assert better(scores, ("uniform 64", "pyramid 64")) == "pyramid 64"
    assert mean([[1.0, 0.0], [0.5]]) == 0.5


def test_a_difference_shows_its_interval() -> None:
    shown = str(Difference(0.25, 0.2, 0.3))
    assert shown == "+0.2500 (95 % +0.2000 to +0.3000)"


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Scores]]:
    """All that is compared, as if it had been answered: found ones are 0.2 better."""
    scores = {layers.EXACT: scores_of(1.0)}
    for target in TARGETS:
        scores |= {f"uniform {target}": scores_of(0.6), f"pyramid {target}": scores_of(0.5)}
        scores[f"found {target}"] = scores_of(0.8)
    scores |= {f"{source} to {target}": scores_of(0.8) for source, target in layers.EXPANDED}
    scores |= {f"seed {seed}": scores_of(0.8) for seed in (1, 2)}
    monkeypatch.setattr(layers, "held_out", lambda num_contexts: scores)
    yield scores


def test_lines_are_ok_where_budgets_gain(answered: dict[str, Scores]) -> None:
    lines = [*layers.measure_found(), *layers.measure_expanded(), *layers.measure_seeds()]
    assert [line.ok for line in lines] == [True] * 7
    assert "+0.2000" in lines[0].figure and "80 questions" in lines[0].figure


@pytest.mark.parametrize(
    ("name", "value", "ok"),
    [
        ("pyramid 128", 0.81, [True, False, True, False, True, True, True]),
        ("128 to 256", 0.78, [True, True, True, True, True, False, True]),
        ("seed 2", 0.77, [True, True, True, True, True, True, False]),
    ],
)
def test_a_line_is_missed(answered: dict[str, Scores], name: str, value: float, ok: list[bool]) -> None:
    answered[name] = scores_of(value)
    lines = [*layers.measure_found(), *layers.measure_expanded(), *layers.measure_seeds()]
    assert [line.ok for line in lines] == ok


def test_groups_are_those_of_separate_curves() -> None:
    low, high = np.array([[0.1, 0.4, 1.0]] * 5), np.array([[0.8, 0.9, 1.0]] * 7)
    points = np.concatenate([low, high]) + np.linspace(0.0, 0.01, 12)[:, None]
    own = nearest(points, grouped(points, 2))
    assert len(set(own[:5])) == len(set(own[5:])) == 1 and own[0] != own[5]


def test_committed_files_are_of_every_search() -> None:
    for each in all_searches():
        budgets = committed(each)
        assert each.target * 3 <= sum(budgets) < (each.target + 1) * 3


def test_held_out_contexts_are_none_of_the_searches() -> None:
    small = {"families": ("needle",), "num_tokens": 64, "num_questions": 1}
    searched = {
        tuple(tokens) for each in all_searches() for tokens, _ in Questions(3, each.questions.seed, **small).contexts()
    }
    for seed in (layers.HELD_OUT.seed, layers.OTHER_TASKS.seed):
        assert seed < SEARCHED_ON.seed
        assert not searched & {tuple(tokens) for tokens, _ in Questions(3, seed, **small).contexts()}
