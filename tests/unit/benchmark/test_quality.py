"""Scores of answers: what is compared with what, and what is not compared twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.benchmark.raw import request, requests, write_plan, write_run

from sglang_evicpress.benchmark import quality
from sglang_evicpress.benchmark.quality import score_runs
from sglang_evicpress.benchmark.results import Score, read_scores
from sglang_evicpress.profiler.engine import Answer, Likelihood


class Counting:
    """Instead of minilm: every two answers that differ are 0.25 alike."""

    def __init__(self) -> None:
        self.compared: list[tuple[str, str]] = []
        self.prepared: set[str] = set()

    def prepare(self, texts: Sequence[str]) -> None:
        self.prepared.update(texts)

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        assert {exact.text, given.text} <= self.prepared
        self.compared.append((exact.text, given.text))
        return 0.25


def scores(folder: Path) -> dict[tuple[str, int, float, int], Score]:
    return read_scores(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The full cache says "a b" and "c d"; ours the first and "c e", where the truth is "c e f"."""
    write_plan(tmp_path, {"full-cache": "full-cache", "ours": "evicpress"})
    truth = {"reference": "c e f"}
    write_run(tmp_path, "full-cache", 2, [request(0, answer="a b"), request(1, answer="c d", **truth)])
    write_run(tmp_path, "ours", 2, [request(0, answer="a b"), request(1, answer="c e", **truth)])
    return tmp_path


def test_answers_are_compared_with_the_bounds_and_with_the_truth(folder: Path) -> None:
    score_runs(folder, minilm=Counting())
    found = scores(folder)
    same, other = found["ours", 0, 2.0, 0], found["ours", 0, 2.0, 1]
    assert (same.f1_full_cache, same.minilm_full_cache, same.f1_truth) == (1.0, 1.0, None)
    assert (other.f1_full_cache, other.minilm_full_cache) == (0.5, 0.25)  # one word of two and two
    assert other.f1_truth == pytest.approx(0.8)  # two words of two and three
    full_cache = found["full-cache", 0, 2.0, 1]
    assert (full_cache.f1_full_cache, full_cache.minilm_full_cache, full_cache.f1_truth) == (1.0, 1.0, 0.4)


def test_identical_answers_are_not_embedded(folder: Path) -> None:
    minilm = Counting()
    scored = score_runs(folder, minilm=minilm)
    assert minilm.compared == [("c d", "c e")]
    assert (scored.num_requests, scored.num_compared, scored.why_no_minilm) == (4, 1, None)


def test_only_what_is_new_is_embedded(folder: Path) -> None:
    score_runs(folder, minilm=Counting())
    write_run(folder, "ours", 2, [request(0, answer="a b"), request(1, answer="c e")], repetition=1)
    write_run(folder, "full-cache", 2, [request(0, answer="a x"), request(1, answer="c d")], repetition=1)
    again = Counting()
    assert score_runs(folder, minilm=again).num_compared == 1
    assert again.compared == [("a x", "a b")]
    assert scores(folder)["ours", 1, 2.0, 1].minilm_full_cache == 0.25


def test_a_run_that_was_made_again_is_scored_anew(folder: Path) -> None:
    score_runs(folder, minilm=Counting())
    write_run(folder, "ours", 2, [request(0, answer="z"), request(1, answer="c e")])
    score_runs(folder, minilm=Counting())
    assert scores(folder)["ours", 0, 2.0, 0].f1_full_cache == 0.0


def test_scoring_twice_writes_the_same(folder: Path) -> None:
    score_runs(folder, minilm=Counting())
    first = (folder / "scores.jsonl").read_bytes()
    score_runs(folder, minilm=Counting())
    assert (folder / "scores.jsonl").read_bytes() == first


def test_repetitions_and_levels_have_bounds_of_their_own(folder: Path) -> None:
    for repetition, rate in ((1, 2), (0, 4)):
        write_run(folder, "full-cache", rate, [request(0, answer="p q")], repetition=repetition)
        write_run(folder, "ours", rate, [request(0, answer="a b")], repetition=repetition)
    score_runs(folder, minilm=Counting())
    found = scores(folder)
    assert [found["ours", *key, 0].f1_full_cache for key in ((0, 2.0), (1, 2.0), (0, 4.0))] == [1.0, 0.0, 0.0]


def test_what_failed_has_no_score_and_is_no_reference(folder: Path) -> None:
    write_run(folder, "full-cache", 2, requests([None, 0.1], ["", "c d"]))
    write_run(folder, "ours", 2, requests([0.1, None], ["a b", ""]))
    score_runs(folder, minilm=Counting())
    found = scores(folder)
    assert found["ours", 0, 2.0, 0] == Score(None, None, None)
    assert ("ours", 0, 2.0, 1) not in found
    assert ("full-cache", 0, 2.0, 0) not in found


def test_without_the_bound_there_is_only_the_truth(tmp_path: Path) -> None:
    write_plan(tmp_path, {"ours": "evicpress"})
    write_run(tmp_path, "ours", 2, [request(0, answer="a", reference="a")])
    score_runs(tmp_path, minilm=Counting())
    assert scores(tmp_path)["ours", 0, 2.0, 0] == Score(None, None, 1.0)


def test_without_minilm_the_rest_is_scored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ValueError(f"no {name}")

    monkeypatch.setattr(quality, "get_scorer", missing)
    assert score_runs(folder).why_no_minilm == "no minilm"
    found = scores(folder)
    assert {score.minilm_full_cache for score in found.values()} == {None}
    assert found["ours", 0, 2.0, 1].f1_full_cache == 0.5
    score_runs(folder, minilm=Counting())
    assert scores(folder)["ours", 0, 2.0, 1].minilm_full_cache == 0.25


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan\.json cannot be read"):
        score_runs(tmp_path)


def test_a_broken_run_is_named(folder: Path) -> None:
    path = write_run(folder, "ours", 8, [request(0)])
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"ours/0-8\.jsonl is not a run"):
        score_runs(folder)
