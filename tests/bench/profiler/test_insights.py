"""Statements on sensitivity and wins follow from the scores."""

from __future__ import annotations

import statistics

import pytest
from evicbench.profiler.insights import (
    MARGIN,
    TIE,
    Spread,
    halves,
    sensitivity,
    sensitivity_line,
    tables,
    winner,
    wins,
    wins_line,
)
from evicbench.profiler.study import Measured
from tests.bench.profiler.measured import context

from sglang_evicpress.core import Form


def favours(number: int, press: str, lead: float = 0.1, held_out: str | None = None) -> Measured:
    """A context whose best press is ``press``, and ``held_out`` for held-out questions."""
    return context(
        number,
        lambda form: 0.5 + lead * (form.press == press),
        held_out=lambda form: 0.5 + lead * (form.press == (held_out or press)),
    )


def test_sensitivity_is_what_keydiff_loses() -> None:
    measured = context(1, lambda form: 0.25 if form == Form("keydiff", 0.1) else 1.0)
    assert sensitivity(measured, 0.1) == pytest.approx(0.75)
    assert sensitivity(measured, 0.9) == 0.0


def test_spread_is_relative_to_the_mean() -> None:
    found = Spread.of([0.1, 0.2, 0.6])
    assert (found.median, found.least, found.most) == (0.2, 0.1, 0.6)
    assert found.cv == pytest.approx(statistics.stdev([0.1, 0.2, 0.6]) / 0.3)
    assert Spread.of([0.0, 0.0]).cv == 0.0


def test_halves_agree_where_contexts_differ_and_not_where_questions_do() -> None:
    same = [context(number, lambda form, n=number: n / 10) for number in range(1, 5)]
    turned = [context(n, lambda form, n=n: n / 10, held_out=lambda form, n=n: 1 - n / 10) for n in range(1, 5)]
    assert halves(same, 0.1) == pytest.approx(1.0)
    assert halves(turned, 0.1) == pytest.approx(-1.0)
    assert halves([context(number, lambda form: 0.5) for number in range(3)], 0.1) == 0.0


def test_one_question_has_no_halves() -> None:
    asked_twice = [context(number, lambda form, n=number: n / 10) for number in range(1, 5)]
    once = context(9, lambda form: 0.9, family="title")
    assert halves([*asked_twice, once], 0.1) == pytest.approx(1.0)


def test_a_lead_within_the_margin_is_a_tie() -> None:
    assert winner({"keydiff": 0.5, "snapkv": 0.5 + 2 * MARGIN}) == "snapkv"
    assert winner({"keydiff": 0.5, "snapkv": 0.5 + MARGIN / 2}) == TIE
    assert winner({"keydiff": 1.0, "snapkv": 1.0, "knorm": 0.0}) == TIE


def test_wins_count_every_context_once() -> None:
    contexts = [favours(1, "keydiff"), favours(2, "keydiff"), favours(3, "knorm"), favours(4, "snapkv", 0.01)]
    assert wins(contexts, 0.5) == {"keydiff": 2, "knorm": 1, TIE: 1}


@pytest.mark.parametrize(
    ("presses", "ok"), [(("keydiff", "snapkv"), True), (("keydiff", "keydiff"), False), (("", ""), False)]
)
def test_wins_line_wants_two_winners(presses: tuple[str, ...], ok: bool) -> None:
    assert wins_line([favours(number, press) for number, press in enumerate(presses)], 0.4).ok is ok


def test_sensitivity_line_is_missed_where_contexts_do_not_differ() -> None:
    alike = [context(number, lambda form: 0.5) for number in range(4)]
    differing = [context(number, lambda form, n=number: n / 10) for number in range(1, 5)]
    assert not sensitivity_line(alike).ok
    assert sensitivity_line(differing).ok


def test_tables_have_a_row_for_every_fraction_and_a_column_for_every_family() -> None:
    families = ("needle", "needle", "title", "title")
    text = tables([context(number, lambda form: 0.25, family=family) for number, family in enumerate(families)])
    assert "| kept, scorer | needle | title | all | r |" in text
    assert "| 0.1, logprob | 0.750 (0.00) | 0.750 (0.00) | 0.750 (0.00) | 0.00 |" in text
    assert "| 0.4, logprob | 0 | 0 | 0 | 0 | 0 | 4 |" in text
