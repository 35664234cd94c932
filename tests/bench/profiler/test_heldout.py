"""The product's choice, the oracle's and what is made of them."""

from __future__ import annotations

import pytest
from evicbench.profiler.choices import COLUMNS, KEPT, most_useful, within
from evicbench.profiler.heldout import Tables, calibration_line, choice_line, utility_line
from evicbench.profiler.study import Measured
from tests.bench.profiler.measured import NUM_HELD_OUT, NUM_TRAINING, context

from sglang_evicpress.core import Form


def good(press: str) -> float:
    return 0.9 if press == "snapkv" else 0.4


def same(number: int) -> Measured:
    return context(number, lambda form: good(form.press or ""))


def misled(number: int) -> Measured:
    """Training questions speak for knorm, held-out ones for snapkv."""
    return context(
        number, lambda form: 0.9 if form.press == "knorm" else 0.4, held_out=lambda form: good(form.press or "")
    )


def test_tables_have_a_row_for_each_context_and_a_column_for_each_form() -> None:
    tables = Tables.of([same(1), same(2), misled(3)])
    assert tables.expected.shape == tables.means.shape == tables.held_out["f1"].shape == (3, len(COLUMNS))
    assert tables.answers.shape == (3, len(COLUMNS), NUM_TRAINING + NUM_HELD_OUT)
    assert (tables.expected[:, -1] == 1.0).all()
    snapkv = COLUMNS.index(Form("snapkv", 0.5))
    assert tables.means[:, snapkv] == pytest.approx([0.9, 0.9, 0.4])
    assert tables.held_out["logprob"][:, snapkv] == pytest.approx([0.9, 0.9, 0.9])


def test_bounds_are_below_means_where_scores_spread() -> None:
    spread = same(1)
    form = Form("snapkv", 0.5)
    scores = {**spread.training, form: [0.8, 1.0] * (NUM_TRAINING // 2)}
    tables = Tables.of([Measured("needle", spread.key, spread.num_tokens, scores, spread.held_out)])
    column = COLUMNS.index(form)
    assert tables.expected[0, column] < tables.means[0, column] == pytest.approx(0.9)


@pytest.mark.parametrize("choose", [within(0.5), most_useful(1.5)])
def test_a_choice_that_holds_reaches_the_oracle(choose: object) -> None:
    tables = Tables.of([same(1), same(2)])
    assert tables.share(choose) == pytest.approx(1.0)
    assert tables.without_hindsight(choose) == pytest.approx(tables.quality(choose, tables.held_out["logprob"]))


def test_a_choice_that_does_not_hold_is_missed() -> None:
    tables = Tables.of([misled(1), misled(2)])
    assert tables.share(within(0.5)) == pytest.approx(0.4 / 0.9)
    line = choice_line(tables, "anything", within(0.5))
    assert not line.ok
    assert line.figure.startswith("44.4%")


def test_calibration_line_is_missed_where_too_much_is_expected() -> None:
    bold = context(1, lambda form: 0.9, held_out=lambda form: 0.2)
    assert calibration_line(Tables.of([same(1), same(2)])).ok
    assert not calibration_line(Tables.of([bold])).ok


def test_keydiff_alone_never_chooses_another_press() -> None:
    tables = Tables.of([same(1)])
    (column,) = within(0.5)(tables.keydiff_alone)
    assert COLUMNS[column].press == "keydiff"


def test_questions_that_disagree_cost_an_oracle_its_hindsight() -> None:
    """Each held-out question is answered right by one of two presses, in turn: which one is better is chance."""
    base = context(1, lambda form: 0.5 if form.press in ("keydiff", "snapkv") else 0.0)
    turns = {"keydiff": [1.0, 0.0] * 10, "snapkv": [0.0, 1.0] * 10}
    held_out = {form: turns.get(form.press or "", scores) for form, scores in base.held_out["logprob"].items()}
    contexts = [Measured("needle", base.key, 1984, base.training, {**base.held_out, "logprob": held_out})]
    tables = Tables.of(contexts)
    choose = within(0.5)
    assert tables.quality(choose, tables.held_out["logprob"]) == pytest.approx(0.5)
    assert tables.without_hindsight(choose) == 0.0


def test_utility_line_compares_what_was_kept_too() -> None:
    line = utility_line(Tables.of([same(1), same(2)]))
    assert line.ok
    assert "kept 0.20/0.20" in line.figure
    assert KEPT.min() == 0.2
