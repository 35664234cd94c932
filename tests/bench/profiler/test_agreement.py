"""Ranks are compared with their ties."""

from __future__ import annotations

import pytest
from evicbench.profiler.agreement import qualities, rank_correlation
from evicbench.profiler.study import FORMS, NUM_JUDGED, Measured
from tests.bench.profiler.measured import context


def test_the_same_order_correlates_fully_whatever_the_scale() -> None:
    assert rank_correlation([0.1, 0.2, 0.9], [0.5, 0.6, 0.61]) == pytest.approx(1.0)
    assert rank_correlation([0.1, 0.2, 0.9], [0.9, 0.5, 0.1]) == pytest.approx(-1.0)


def test_tied_forms_share_their_rank() -> None:
    """Ranks 1, 2, 3 against 1, 2.5, 2.5."""
    assert rank_correlation([0.1, 0.2, 0.3], [0.1, 1.0, 1.0]) == pytest.approx(0.75**0.5)


def test_nothing_is_said_where_all_forms_are_equal() -> None:
    assert rank_correlation([0.1, 0.2], [1.0, 1.0]) is None
    assert rank_correlation([1.0, 1.0], [0.1, 0.2]) is None


def test_both_scorers_are_asked_about_the_same_questions() -> None:
    base = context(1, lambda form: 0.5)
    later = {form: [1.0] * NUM_JUDGED + [0.0] * 12 for form in FORMS}
    measured = Measured("needle", base.key, 1984, base.training, {**base.held_out, "logprob": later})
    assert qualities(measured, "logprob") == [1.0] * len(FORMS)
