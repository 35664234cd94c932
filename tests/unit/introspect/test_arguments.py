from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import PRESSES, Form, Tier
from sglang_evicpress.introspect import arguments as checked
from sglang_evicpress.introspect.arguments import IntrospectionError, Json


def refusal(ask: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Why it is refused: one sentence, status 400."""
    with pytest.raises(IntrospectionError) as caught:
        ask(*args, **kwargs)
    assert caught.value.status == 400 and "\n" not in caught.value.reason
    assert caught.value.body == {"error": {"reason": caught.value.reason}} and str(caught.value) == caught.value.reason
    return caught.value.reason


def test_only_what_is_accepted_is_taken() -> None:
    checked.accept_only({"form": 1}, "form", "node_id")
    checked.accept_only({})
    assert refusal(checked.accept_only, {"from": 1}, "form", "node_id") == (
        "argument 'from' is not known here: accepted are form, node_id"
    )
    assert refusal(checked.accept_only, {"from": 1}) == "argument 'from' is not known here: accepted are none"


@given(st.integers(0, 10**18 - 1))
def test_whole_numbers_come_as_numbers_or_as_text(number: int) -> None:
    assert checked.integer({"n": number}, "n", least=0) == checked.integer({"n": str(number)}, "n", least=0) == number


@pytest.mark.parametrize("value", [-1, "-1", 1.0, "1.0", True, None, "", " 1", "1 ", "٣", "1_000", 10**18, [1], "0x1"])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    assert refusal(checked.integer, {"n": value}, "n", least=0) == (
        f"n is {value!r}: expected an integer >= 0 of at most 18 digits"
    )


def test_a_number_that_is_missing_or_too_small_is_refused() -> None:
    assert refusal(checked.integer, {}, "n", least=1).startswith("n is missing: expected an integer >= 1")
    assert refusal(checked.integer, {"n": 0}, "n", least=1).startswith("n is 0: expected an integer >= 1")


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), ("true", True), ("1", True), (False, False), ("false", False), ("0", False)]
)
def test_a_flag_is_true_or_false(value: object, expected: bool) -> None:
    assert checked.flag({"adopt": value}, "adopt") is expected


def test_a_flag_that_is_not_given_is_false() -> None:
    assert checked.flag({}, "adopt") is False


@pytest.mark.parametrize("value", [1, 0, None, "yes", "True", "", [True]])
def test_what_is_neither_true_nor_false_is_refused(value: object) -> None:
    assert refusal(checked.flag, {"adopt": value}, "adopt") == f"adopt is {value!r}: expected true or false"


@given(st.sampled_from(sorted(PRESSES)), st.integers(1, 99))
def test_a_form_reads_as_it_is_written(press: str, percent: int) -> None:
    form = Form(press, percent / 100)
    assert checked.form({"form": str(form)}, "form") == form


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ("form is missing", "keydiff@0.5")),
        ({"form": None}, ("form is None",)),
        ({"form": 0.5}, ("form is 0.5", "a string")),
        ({"form": "exact"}, ("'exact' compresses nothing",)),
        ({"form": "zip@0.5"}, ("'zip@0.5'", *PRESSES)),
        ({"form": "knorm"}, ("'knorm'",)),
        ({"form": "knorm@"}, ("'knorm@'", "no number")),
        ({"form": "knorm@0"}, ("keeps 0", "0 < KEPT < 1")),
        ({"form": "knorm@1"}, ("keeps 1",)),
        ({"form": "knorm@1.5"}, ("keeps 1.5",)),
        ({"form": "knorm@nan"}, ("keeps nan",)),
        ({"form": "knorm@0.5+int8"}, ("'knorm@0.5+int8'",)),
    ],
)
def test_what_is_no_lossy_form_is_refused(arguments: Json, words: tuple[str, ...]) -> None:
    reason = refusal(checked.form, arguments, "form")
    assert [word for word in words if word not in reason] == []


def test_a_stored_form_may_have_a_codec() -> None:
    assert str(checked.stored_form({"form": "knorm@0.5+int8"}, "form")) == "knorm@0.5+int8"
    assert "'knorm@0.5+zip'" in refusal(checked.stored_form, {"form": "knorm@0.5+zip"}, "form")


def test_a_tier_is_one_of_those_accepted() -> None:
    tier = partial(checked.tier, accepted=(Tier.HOST, Tier.SSD))
    assert tier({"tier": "host"}, "tier") is Tier.HOST
    assert refusal(tier, {"tier": "gpu"}, "tier") == "tier is 'gpu': expected one of host, ssd"
    assert refusal(tier, {}, "tier") == "tier is missing: expected one of host, ssd"


def test_a_folder_is_an_absolute_path() -> None:
    assert checked.folder({"dir": "/kv"}, "dir") == "/kv"
    for value in ("kv", "", "/kv\0", None, 1):
        assert refusal(checked.folder, {"dir": value}, "dir").startswith(
            f"dir is {value!r}: expected the absolute path"
        )
    assert refusal(checked.folder, {}, "dir").startswith("dir is missing")


@pytest.mark.parametrize("value", [1, 0.5, 1e9])
def test_gigabytes_are_a_number(value: float) -> None:
    assert checked.gigabytes({"gb": value}, "gb") == value


@pytest.mark.parametrize("value", [0, -1, "1", True, float("nan"), float("inf"), 1.1e9, None])
def test_what_is_no_size_is_refused(value: object) -> None:
    assert refusal(checked.gigabytes, {"gb": value}, "gb").startswith(f"gb is {value!r}: expected a number of GB")


def test_a_size_that_is_missing_is_refused() -> None:
    assert refusal(checked.gigabytes, {}, "gb").startswith("gb is missing")
