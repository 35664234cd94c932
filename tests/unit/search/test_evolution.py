"""EvolKV's objective, the order of its groups, a planted optimum, and going on where a search was stopped."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.search.evolution import (
    Budgets,
    SearchSettings,
    Step,
    cache_score,
    found,
    groups_of,
    num_steps,
    population_of,
    search,
)

PLANTED = (200, 40, 120, 40)


def nearness(budgets: Budgets) -> float:
    """A task that is done best with the planted budgets: more than those help no more."""
    return sum(min(have, want) / want for have, want in zip(budgets, PLANTED, strict=True)) / len(PLANTED)


def test_the_cache_score_falls_on_both_sides_of_the_target_as_in_equation_2() -> None:
    assert cache_score([150, 150], 100, 0.2) == 0.5
    assert cache_score([250, 250], 100, 0.2) == 0.0
    assert cache_score([100, 100], 100, 0.2) == 1.0
    assert cache_score([40, 60], 100, 0.2) == pytest.approx(0.9)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64), st.integers(1, 2000), st.floats(0.01, 1.0))
def test_the_cache_score_is_in_0_to_1_and_largest_at_the_target(
    budgets: list[int], target: int, smoothing: float
) -> None:
    score = cache_score(budgets, target, smoothing)
    assert 0.0 <= score <= cache_score([target], target, smoothing) == 1.0
    assert score == 1.0 or sum(budgets) != target * len(budgets)


def test_groups_go_from_the_lowest_layers_up() -> None:
    assert groups_of(32, 8) == [range(0, 8), range(8, 16), range(16, 24), range(24, 32)]
    assert groups_of(10, 4) == [range(0, 4), range(4, 8), range(8, 10)]
    assert groups_of(28, 8)[-1] == range(24, 28)
    assert groups_of(3, 2) == [range(0, 3)], "a layer by itself can give its tokens to no other"


def test_population_is_that_of_the_paper() -> None:
    assert [population_of(size) for size in (1, 2, 4, 8, 16, 32)] == [4, 6, 8, 10, 12, 14]


def test_one_group_after_the_other_moves_and_those_before_stay_at_their_best() -> None:
    steps = list(search(nearness, 4, SearchSettings(100, group_size=2, iterations=3)))
    assert [group for group, _ in itertools.groupby(step.group for step in steps)] == [0, 1]
    lower = [step for step in steps if step.group == 0]
    assert {step.budgets[2:] for step in lower} == {(100, 100)}
    best = [step for step in lower if step.is_best][-1].budgets[:2]
    assert {step.budgets[:2] for step in steps if step.group == 1} == {best}


def test_fitness_is_the_score_weighted_by_the_cache_score_of_the_group() -> None:
    settings = SearchSettings(100, group_size=2, iterations=1, efficiency_weight=0.3, smoothing=0.2)
    for step in search(nearness, 4, settings):
        group = step.budgets[2 * step.group : 2 * step.group + 2]
        assert step.fitness == pytest.approx(step.score * (1 + 0.3 * cache_score(group, 100, 0.2)))


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_optimum_is_found(seed: int) -> None:
    steps = list(search(nearness, 4, SearchSettings(100, group_size=4, iterations=60, seed=seed)))
    budgets = found(steps, 100)
    assert nearness(budgets) > 0.97, budgets
    assert nearness((100,) * 4) < 0.85, "what it starts with is not it already"


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    settings, asked = SearchSettings(100, group_size=2, iterations=4, seed=5), list[Budgets]()

    def counted(budgets: Budgets) -> float:
        asked.append(budgets)
        return nearness(budgets)

    whole = list(search(nearness, 4, settings))
    path = tmp_path / "journal"
    list(itertools.islice(search(counted, 4, settings, path), 10))
    path.write_bytes(path.read_bytes()[:-5])  # stopped in the middle of a line
    num_before = len(set(asked))
    asked.clear()
    assert list(search(counted, 4, settings, path)) == whole
    assert num_before + len(asked) == len({step.budgets for step in whole}) + 1, "only the cut line is asked for twice"
    asked.clear()
    assert list(search(counted, 4, settings, path)) == whole and not asked


def test_a_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    next(search(nearness, 4, SearchSettings(100, group_size=2), path, {"press": "snapkv"}))
    with pytest.raises(ValueError, match=r"is the journal of another search \(press 'snapkv', not 'keydiff'\)"):
        next(search(nearness, 4, SearchSettings(100, group_size=2), path, {"press": "keydiff"}))


@pytest.mark.parametrize("content", ["no JSON\n", "no line", "[1]\n", "{}\n[1]\n", '{}\n{"budgets": [1]}\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal"
    path.write_text(content)
    with pytest.raises(ValueError, match="expected the journal of a search, or no file"):
        next(search(nearness, 4, SearchSettings(100, group_size=2), path))
    assert path.read_text() == content


def test_another_seed_uses_the_scores_that_are_there(tmp_path: Path) -> None:
    path, settings = tmp_path / "journal", SearchSettings(100, group_size=2, seed=1)
    list(search(nearness, 4, SearchSettings(100, group_size=2), path))
    assert list(search(nearness, 4, settings, path)) == list(search(nearness, 4, settings))
    assert not path.read_bytes().endswith(b"]}\n") and path.read_bytes().count(b"\n") > 100


@pytest.mark.parametrize(("groups", "steps"), [((8,), 30), ((2, 2, 2, 2), 72), ((4, 4), 48)])
def test_the_number_of_candidates_is_known_before(groups: tuple[int, ...], steps: int) -> None:
    settings = SearchSettings(100, group_size=groups[0], iterations=3)
    assert num_steps(8, settings) == steps == len(list(search(lambda _: 1.0, 8, settings)))


def test_no_layer_keeps_fewer_than_the_least() -> None:
    steps = list(search(lambda budgets: -float(sum(budgets)), 4, SearchSettings(10, iterations=40, least=4)))
    assert min(min(step.budgets) for step in steps) == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": 0}, "target is 0"),
        ({"target": 5, "group_size": 1}, "group_size is 1"),
        ({"target": 5, "smoothing": 0.0}, "smoothing is 0.0"),
        ({"target": 5, "sigma": 0.0}, "sigma is 0.0"),
        ({"target": 5, "efficiency_weight": -1.0}, "efficiency_weight is -1.0"),
        ({"target": 3, "least": 4}, "target is 3: expected at least 4"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, int | float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchSettings(**fields)  # type: ignore[arg-type]


def test_the_first_candidate_counts_whatever_it_is() -> None:
    first: Step = next(search(lambda _: 0.0, 4, SearchSettings(10, group_size=2)))
    assert first.is_best and first.fitness == 0.0
