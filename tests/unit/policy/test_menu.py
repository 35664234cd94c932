"""The menu: how many slots a form takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.policy.menu import Menu


@given(st.integers(1, 400), st.floats(1e-12, 1.0, exclude_max=True), st.sampled_from([1, 16]), st.integers(0, 40))
def test_a_form_keeps_enough_whole_pages_and_never_more_than_there_are(
    num_units: int, kept_fraction: float, page_size: int, sinks: int
) -> None:
    num_tokens = num_units * page_size
    menu = Menu((), page_size=page_size)
    kept = menu.num_slots(Form("keydiff", kept_fraction), num_tokens, min(sinks, num_tokens))
    assert kept % page_size == 0 and 1 <= kept <= num_tokens
    assert kept >= min(sinks, num_tokens)
    assert kept >= num_tokens * kept_fraction - 1e-6
    assert kept < max(num_tokens * kept_fraction, sinks, 1) + page_size


@pytest.mark.parametrize(
    ("num_tokens", "kept_fraction", "page_size", "slots"),
    [(1000, 0.1, 1, 100), (30, 0.1, 1, 3), (100, 0.29, 1, 29), (160, 0.3, 16, 48), (160, 0.31, 16, 64)],
)
def test_slots_are_not_moved_by_the_last_bit_of_a_fraction(
    num_tokens: int, kept_fraction: float, page_size: int, slots: int
) -> None:
    assert Menu((), page_size=page_size).num_slots(Form("keydiff", kept_fraction), num_tokens) == slots


def test_the_exact_form_comes_first_and_forms_by_falling_bytes() -> None:
    menu = Menu((Form("snapkv", 0.2), Form("keydiff", 0.5), EXACT, Form("keydiff", 0.2)), slot_bytes=8)
    assert [str(form) for form in menu.forms] == ["exact", "keydiff@0.5", "keydiff@0.2", "snapkv@0.2"]
    assert menu.sizes(10) == (80, 40, 16, 16)


def test_only_a_smaller_form_of_the_same_press_can_be_made_of_a_lossy_node() -> None:
    menu = Menu((Form("snapkv", 0.2), Form("keydiff", 0.5), Form("keydiff", 0.2)))
    assert menu.smaller(EXACT) == menu.everything == 0b1111
    assert menu.smaller(Form("keydiff", 0.5)) == 0b0100
    assert menu.smaller(Form("keydiff", 0.7)) == 0b0110
    assert menu.smaller(Form("knorm", 0.7)) == 0


@pytest.mark.parametrize(
    ("form", "made"),
    [
        ("exact+int8", "keydiff@0.5+int8 exact+int4 keydiff@0.5+int4"),
        ("exact+int4", "keydiff@0.5+int4"),  # coarse: another codec would lose more than was measured
        ("keydiff@0.8", "keydiff@0.5 keydiff@0.5+int8 keydiff@0.5+int4"),
        ("keydiff@0.8+int4", "keydiff@0.5+int4"),
        ("keydiff@0.5+int8", "keydiff@0.5+int4"),
        ("snapkv@0.8+int8", ""),
        ("exact+fp8", ""),
    ],
)
def test_of_a_fine_codec_everything_smaller_is_made(form: str, made: str) -> None:
    names = "keydiff@0.5", "exact+int8", "exact+int4", "keydiff@0.5+int8", "keydiff@0.5+int4"
    menu = Menu(tuple(map(Form.parse_stored, names)))
    press, _, codec = form.partition("+")
    mask = menu.smaller(replace(Form.parse(press), codec=codec or "raw"))
    found = [str(each) for index, each in enumerate(menu.forms) if mask >> index & 1]
    assert sorted(found) == sorted(made.split())


def test_more_forms_than_bits_are_refused() -> None:
    forms = [Form("keydiff", kept / 100) for kept in range(1, 63)]
    assert len(Menu(tuple(forms[:61])).forms) == 62
    with pytest.raises(ValueError, match="63 forms are on the menu: expected at most 62"):
        Menu(tuple(forms))


def test_a_codec_without_a_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"form keydiff@0.5\+int8 has no codec ratio: expected one of raw"):
        Menu((Form("keydiff", 0.5, "int8"),), codec_ratio={"raw": 1.0})
