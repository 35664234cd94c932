from __future__ import annotations

import pytest

from sglang_evicpress.introspect.series import SERIES, Series


def test_every_star_of_a_path_is_a_label() -> None:
    figures = {"tiers": {"gpu": {"forms": {"exact": {"bytes": 5}}}, "host": {"forms": {"int8": {"bytes": 7}}, "x": 1}}}
    series = Series("stored", "gauge", "", "tiers.*.forms.*.bytes", ("tier", "form"))
    assert dict(series.read(figures)) == {("gpu", "exact"): 5.0, ("host", "int8"): 7.0}


@pytest.mark.parametrize(
    "found", [{}, {"a": None}, {"a": {"b": "text"}}, {"a": {"b": None}}, {"a": {"b": [1]}}, {"a": 3}]
)
def test_what_is_not_there_or_no_number_has_no_value(found: dict[str, object]) -> None:
    assert list(Series("x", "gauge", "", "a.b").read(found)) == []


def test_a_fact_is_one_or_zero() -> None:
    series = Series("x", "gauge", "", "a")
    assert [list(series.read({"a": fact})) for fact in (True, False)] == [[((), 1.0)], [((), 0.0)]]


def test_a_row_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one for each"):
        Series("x", "gauge", "", "a.*", ())
    with pytest.raises(ValueError, match="expected _total at the end of counters alone"):
        Series("x", "counter", "", "a")
    with pytest.raises(ValueError, match="expected _total at the end of counters alone"):
        Series("x_total", "gauge", "", "a")


def test_names_are_unique_and_said_in_a_sentence() -> None:
    assert len({series.name for series in SERIES}) == len(SERIES) > 40
    assert all(series.text.endswith(".") and series.text[0].isupper() or series.text[0].isdigit() for series in SERIES)
