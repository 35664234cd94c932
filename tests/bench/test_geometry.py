"""Comparison of geometry with other presses: its answers, intervals and lines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from evicbench import geometry
from evicbench.correctness.reference import Reference
from evicbench.geometry import FRACTIONS, NAMES, Asked
from evicbench.testbed.server import MODEL
from evicbench.testbed.tasks import FAMILIES, make_context


def asked(context: int, gain: float, family: str = "needle") -> Asked:
    """Geometry has 0.5 and ``gain`` more than the others."""
    scores = {(name, kept): 0.5 + gain * (name == "geometry") for name in NAMES for kept in FRACTIONS}
    return Asked(context, family, scores)


def test_an_interval_is_of_differences_between_contexts() -> None:
    alike = [asked(number, 0.2) for number in range(8) for _ in range(4)]
    assert geometry.interval(alike, 0.5, "snapkv") == pytest.approx((0.2, 0.2, 0.2))
    apart = [asked(number, 0.3 * (-1) ** number) for number in range(8) for _ in range(4)]
    mean, low, high = geometry.interval(apart, 0.5, "snapkv")
    assert mean == pytest.approx(0.0) and low < -0.1 and high > 0.1
    # Questions about one context are not independent of each other.
    once = [asked(number, 0.3 * (-1) ** number) for number in range(8)]
    assert geometry.interval(once, 0.5, "snapkv") == pytest.approx((mean, low, high))


def test_a_family_has_a_row_for_each_press() -> None:
    found = [asked(number, 0.25, family) for number, family in enumerate(FAMILIES)]
    lines = geometry.table(found)
    assert len(lines) == 2 + len(NAMES) * (1 + len(FAMILIES))
    assert lines[2] == "| all, 9 questions | geometry | 0.750 | 0.750 | 0.750 | 0.750 | 0.750 |"


@pytest.mark.parametrize(("num_questions", "num_contexts", "ok"), [(300, 12, True), (299, 12, False), (40, 1, None)])
def test_a_line_is_missed_with_too_few_questions(
    num_questions: int, num_contexts: int, ok: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [asked(number, 0.1, FAMILIES[number % 9]) for number in range(num_questions)]
    monkeypatch.setattr(geometry, "measure_all", lambda num: found)
    monkeypatch.setattr(geometry, "out_file", lambda area, name: tmp_path / name)
    lines = list(geometry.compare(num_contexts))
    assert [line.ok for line in lines] == [ok] * 3
    assert "0.5 kept: 0.600, +0.100 [+0.100, +0.100]" in lines[0].figure
    assert (tmp_path / "geometry.md").read_text().startswith("| questions | press | 0.8 kept |")


@pytest.mark.slow
def test_over_everything_kept_answers_are_those_of_the_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "FRACTIONS", (1.0, 0.1))
    context = make_context("needle", 128, random.Random(5))
    found = list(geometry.ask(Reference(MODEL), 0, context, geometry.presses()))
    assert len(found) == 4
    assert all(one.scores[name, 1.0] == 1.0 for one in found for name in NAMES)
    assert min(one.scores["geometry", 0.1] for one in found) < 1.0
