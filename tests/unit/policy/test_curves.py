from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import CODECS, EXACT, PRESSES, Form
from sglang_evicpress.policy.quality_curves import Curves

MEASURED = {"keydiff": {"0.8": 0.99, "0.5": 0.9}, "snapkv": {"0.4": 0.6}, "default": {"0.5": 0.7}}

unit = st.floats(0.0, 1.0)
kept_fractions = st.floats(0.01, 0.99)
measured_points = st.dictionaries(kept_fractions.map(repr), unit, min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("exact", 1.0),
        ("keydiff@0.8", 0.99),
        ("keydiff@0.5", 0.9),
        ("keydiff@0.65", 0.945),  # half way between the two points
        ("keydiff@0.9", 0.995),  # half way to (1, 1)
        ("keydiff@0.25", 0.45),  # half of the lowest point
        ("snapkv@0.4", 0.6),
        ("snapkv@0.7", 0.8),
        ("knorm@0.5", 0.7),  # default
        ("knorm@0.05", 0.07),
    ],
)
def test_quality_is_linear_between_the_points_and_towards_zero_below_them(form: str, expected: float) -> None:
    assert Curves.from_json(MEASURED).quality(Form.parse(form)) == pytest.approx(expected)


def test_a_codec_of_which_nothing_is_given_counts_nothing() -> None:
    curves = Curves.from_json(MEASURED)
    assert curves.quality(Form("keydiff", 0.5, "int8")) == 0.0
    assert curves.quality(Form(codec="fp8")) == 0.0


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("exact+int4", 0.95),
        ("keydiff@0.5+int4", 0.7),  # as it was measured
        ("keydiff@0.8+int4", 0.94),  # 1 - 0.01 - 0.05
        ("snapkv@0.4+int4", 0.55),
        ("snapkv@0.4+int2", 0.1),
        ("knorm@0.1+int2", 0.0),
        ("keydiff@0.8", 0.99),
    ],
)
def test_what_was_not_measured_together_loses_what_both_lose(form: str, expected: float) -> None:
    given_curves = {**MEASURED, "exact+int4": 0.95, "exact+int2": 0.5, "keydiff@0.5+int4": 0.7}
    curves = Curves.from_json(given_curves)
    assert curves.knows(Form.parse_stored(form))
    assert curves.quality(Form.parse_stored(form)) == pytest.approx(expected)


@given(kept_fractions, unit, unit)
def test_press_and_codec_are_never_expected_to_be_better_than_either(kept: float, pressed: float, coded: float) -> None:
    curves = Curves.measured({Form("keydiff", kept): pressed, Form(codec="int4"): coded})
    assert curves.quality(Form("keydiff", kept, "int4")) <= min(pressed, coded) + 1e-12


def test_codecs_alone_may_be_given() -> None:
    curves = Curves.from_json({"exact+int8": 0.999})
    assert curves.quality(Form(codec="int8")) == 0.999
    assert not curves.knows(Form("keydiff", 0.5)) and not curves.knows(Form("keydiff", 0.5, "int8"))


def test_a_press_that_is_not_given_gets_the_lowest_curve_when_there_is_no_default() -> None:
    curves = Curves.from_json({"keydiff": {"0.8": 0.99, "0.2": 0.1}, "snapkv": {"0.4": 0.5}})
    assert curves.quality(Form("knorm", 0.8)) == pytest.approx(0.5 + 0.5 * 0.4 / 0.6)
    assert curves.quality(Form("knorm", 0.2)) == pytest.approx(0.1)


def test_quality_need_not_rise_with_what_is_kept() -> None:
    curves = Curves.from_json({"keydiff": {"0.8": 0.5, "0.5": 0.75}})
    assert curves.quality(Form("keydiff", 0.8)) == 0.5
    assert curves.quality(Form("keydiff", 0.5)) == 0.75


def test_keeping_everything_may_be_listed_with_quality_one() -> None:
    assert Curves.from_json({"knorm": {"1.0": 1, "0.5": 0.5}}) == Curves.from_json({"knorm": {"0.5": 0.5}})


@given(st.dictionaries(st.sampled_from(list(PRESSES)), measured_points, min_size=1), kept_fractions)
def test_quality_stays_within_its_bounds(obj: dict[str, dict[str, float]], kept: float) -> None:
    curves = Curves.from_json(json.loads(json.dumps(obj)))
    given_qualities = {press: curves.quality(Form(press, kept)) for press in obj}
    for press, points in obj.items():
        assert 0.0 <= given_qualities[press] <= 1.0
        lowest = min(points, key=float)
        if kept < float(lowest):
            assert given_qualities[press] <= points[lowest]
        for key, quality in points.items():
            assert curves.quality(Form(press, float(key))) == quality
    for press in set(PRESSES) - set(obj):
        assert curves.quality(Form(press, kept)) <= min(given_qualities.values()) + 1e-12


@given(kept_fractions)
def test_the_prior_follows_its_formula_and_is_never_above_it(kept: float) -> None:
    prior = Curves.prior()
    for press in PRESSES:
        quality = prior.quality(Form(press, kept))
        formula = kept if press == "random" else 1 - (1 - kept) ** 3
        assert formula - 1e-3 < quality < formula + 1e-12
    assert prior.quality(EXACT) == 1.0


def test_the_prior_has_the_figures_of_its_docstring() -> None:
    prior = Curves.prior()
    assert prior.quality(Form("keydiff", 0.8)) == pytest.approx(0.992)
    assert prior.quality(Form("snapkv", 0.5)) == pytest.approx(0.875)
    assert prior.quality(Form("knorm", 0.2)) == pytest.approx(0.488)


@pytest.mark.parametrize(
    ("obj", "names"),
    [
        (None, ["None", "expected an object"]),
        ([], ["[]", "expected an object"]),
        ({}, ["{}", "expected an object"]),
        ({"h2o": {"0.5": 0.9}}, ["'h2o'", "keydiff", "'default'"]),
        ({3: {"0.5": 0.9}}, ["3", "keydiff"]),
        ({"keydiff": 0.9}, ["'keydiff'", "0.9", "expected an object"]),
        ({"keydiff": {}}, ["'keydiff'", "{}", "expected an object"]),
        ({"keydiff": {"0": 0.9}}, ["'keydiff'", "'0'", "(0, 1]"]),
        ({"keydiff": {"1.2": 0.9}}, ["'keydiff'", "'1.2'", "(0, 1]"]),
        ({"keydiff": {"-0.5": 0.9}}, ["'-0.5'", "(0, 1]"]),
        ({"keydiff": {"nan": 0.9}}, ["'nan'", "(0, 1]"]),
        ({"keydiff": {"half": 0.9}}, ["'half'", "(0, 1]"]),
        ({"keydiff": {0.5: 0.9}}, ["0.5", "as a string"]),
        ({"keydiff": {"0.5": 0.9, "0.50": 0.8}}, ["'0.50'", "once"]),
        ({"keydiff": {"0.5": 1.1}}, ["'0.5'", "1.1", "[0, 1]"]),
        ({"keydiff": {"0.5": -0.1}}, ["-0.1", "[0, 1]"]),
        ({"keydiff": {"0.5": math.nan}}, ["nan", "[0, 1]"]),
        ({"keydiff": {"0.5": "0.9"}}, ["'0.9'", "[0, 1]"]),
        ({"keydiff": {"0.5": True}}, ["True", "[0, 1]"]),
        ({"keydiff": {"0.5": None}}, ["None", "[0, 1]"]),
        ({"default": {"1": 0.9}}, ["'default'", "'1'", "0.9", "expected 1"]),
        ({"exact+int4": {"0.5": 0.9}}, ["'exact+int4'", "0.9", "[0, 1]"]),
        ({"exact+int4": 1.5}, ["'exact+int4'", "1.5", "[0, 1]"]),
        ({"exact+fp8": 0.9}, ["'exact+fp8'", "'fp8'", "int4"]),
        ({"keydiff@2+int4": 0.9}, ["'keydiff@2+int4'", "keydiff@0.5"]),
    ],
)
def test_bad_curves_are_refused_by_name(obj: object, names: list[str]) -> None:
    with pytest.raises(ValueError, match="quality curve") as error:
        Curves.from_json(obj)
    for name in names:
        assert name in str(error.value)


def test_measured_curves_know_only_what_they_were_given() -> None:
    points = {("keydiff", 0.8): 0.99, ("keydiff", 0.5): 0.9, ("snapkv", 0.4): 0.6, (None, 1.0, "int8"): 0.98}
    curves = Curves.measured({Form(*form): quality for form, quality in points.items()})
    assert curves.quality(Form("keydiff", 0.65)) == pytest.approx(0.945)
    assert curves.quality(Form("snapkv", 0.2)) == pytest.approx(0.3)
    for form in (EXACT, Form("keydiff", 0.3), Form("snapkv", 0.9), Form("keydiff", 0.5, "int8"), Form(codec="int8")):
        assert curves.knows(form)
    for form in (Form("knorm", 0.5), Form("knorm", 0.5, "int8"), Form("keydiff", 0.5, "int4"), Form(codec="fp8")):
        assert not curves.knows(form)
        assert curves.quality(form) == 0.0
    assert curves.quality(EXACT) == 1.0


def test_nothing_measured_knows_only_the_exact_form() -> None:
    curves = Curves.measured({})
    assert curves.knows(EXACT) and curves.quality(EXACT) == 1.0
    assert not any(curves.knows(Form(press, 0.5)) for press in PRESSES)


def test_default_serves_every_press_and_no_codec() -> None:
    curves = Curves.from_json({"keydiff": {"0.5": 0.9}})
    assert all(curves.knows(Form(press, 0.5)) for press in PRESSES)
    assert curves.knows(EXACT) and not curves.knows(Form("keydiff", 0.5, "int8"))


def test_the_prior_knows_every_press_with_every_codec() -> None:
    prior = Curves.prior()
    assert all(prior.knows(Form(press, 0.5, codec)) for press in PRESSES for codec in CODECS)
    assert [prior.quality(Form(codec=codec)) for codec in ("int8", "int4", "int2")] == [0.999, 0.99, 0.8]


@given(st.dictionaries(st.sampled_from(list(PRESSES)), st.dictionaries(kept_fractions, unit, min_size=1), min_size=1))
def test_measured_curves_read_as_the_same_points_from_json(points: dict[str, dict[float, float]]) -> None:
    curves = Curves.measured(
        {Form(press, kept): quality for press, curve in points.items() for kept, quality in curve.items()}
    )
    written = {press: {repr(kept): quality for kept, quality in curve.items()} for press, curve in points.items()}
    read = Curves.from_json(written)
    assert curves.by_press == {press: curve for press, curve in read.by_press.items() if press != "default"}


@pytest.mark.parametrize(
    ("form", "quality", "names"),
    [
        (Form("h2o", 0.5), 0.9, ["'h2o'", "keydiff"]),
        (Form("default", 0.5), 0.9, ["'default'", "keydiff"]),
        (Form("keydiff", 0.0), 0.9, ["0.0", "(0, 1]"]),
        (Form("keydiff", math.nan), 0.9, ["nan", "(0, 1]"]),
        (Form("keydiff", 0.5), 1.1, ["1.1", "[0, 1]"]),
        (Form("keydiff", 0.5), math.nan, ["nan", "[0, 1]"]),
        (Form("keydiff", 1.0), 0.9, ["0.9", "expected 1"]),
        (Form(codec="int4"), -0.1, ["exact+int4", "-0.1", "[0, 1]"]),
    ],
)
def test_bad_measured_curves_are_refused_by_name(form: Form, quality: float, names: list[str]) -> None:
    with pytest.raises(ValueError, match="quality curve") as error:
        Curves.measured({form: quality})
    for name in names:
        assert name in str(error.value)


def test_fewer_tokens_are_not_taken_for_better_than_more_by_the_same_press_and_codec() -> None:
    poor = {**{"keydiff": {"0.5": 0.9, "0.8": 0.95}, "exact+int4": 0.98}, "keydiff@0.5+int4": 0.6}
    curves = Curves.from_json(poor)
    assert curves.quality(Form("keydiff", 0.5, "int4")) == 0.6
    assert curves.quality(Form("keydiff", 0.49, "int4")) == pytest.approx(0.6 * 0.49 / 0.5)
    assert curves.quality(Form("keydiff", 0.8, "int4")) == pytest.approx(0.95 + 0.98 - 1.0)


def test_a_piece_of_a_form_with_a_codec_is_known_where_that_alone_was_measured() -> None:
    curves = Curves.measured({Form("keydiff", 0.5, "int4"): 0.8})
    piece, more = Form("keydiff", 0.25, "int4"), Form("keydiff", 0.75, "int4")
    assert curves.knows(piece) and curves.quality(piece) == pytest.approx(0.4)
    assert not curves.knows(more) and curves.quality(more) == 0.0
