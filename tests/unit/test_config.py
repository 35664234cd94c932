"""The flags and the config file become one checked value, or one sentence that says what is accepted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sglang_evicpress.config import DEFAULT_FORMS, EvicPressConfig, policy_in
from sglang_evicpress.core import EXACT, Form


def _file(folder: Path, content: object) -> str:
    path = folder / "policy.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


POLICIES = ("evicpress", "lru", "lfu", "slru", "tlru", "hpt", "gdsf", "adaptcache", "keydiff@0.5+lru", "impress@0.1")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_alone_has_the_defaults(policy: str) -> None:
    assert EvicPressConfig.from_flags(policy) == EvicPressConfig(policy)
    assert EvicPressConfig(policy).forms == DEFAULT_FORMS == tuple(map(Form.parse, map(str, DEFAULT_FORMS)))
    assert EvicPressConfig(policy).half_life_s is None


def test_a_policy_brings_its_form_to_the_menu() -> None:
    forms = (Form("knorm", 0.5), EXACT)
    assert EvicPressConfig("evicpress", forms=forms).menu_forms == forms
    assert EvicPressConfig("keydiff@0.7+lru", forms=forms).menu_forms == (*forms, Form("keydiff", 0.7))
    assert EvicPressConfig("knorm@0.5+lru", forms=forms).menu_forms == forms


def test_flags_are_taken() -> None:
    config = EvicPressConfig.from_flags(
        "evicpress", alpha=0, half_life=30, forms="keydiff@0.5, exact,keydiff@0.5", min_tokens=1, sinks=0
    )
    assert config == EvicPressConfig(
        "evicpress", alpha=0.0, half_life_s=30.0, forms=(Form("keydiff", 0.5), EXACT), min_tokens=1, sinks=0
    )


def test_a_file_may_give_every_field(tmp_path: Path) -> None:
    values = {
        "policy": "lru",
        "alpha": 2,
        "half_life": 90,
        "forms": ["knorm@0.3"],
        "min_tokens": 128,
        "sinks": 8,
        "window": 16,
        "min_share": 0.25,
        "curves": {"knorm": {"0.3": 0.9}},
        "prefill_fixed_s": 0.01,
        "prefill_per_token_s": 0.002,
        "prefill_per_pair_s": 1e-7,
    }
    path = _file(tmp_path, values)
    fields = {"half_life_s" if name == "half_life" else name: value for name, value in values.items()}
    config = EvicPressConfig(**(fields | {"forms": (Form("knorm", 0.3),)}))  # type: ignore[arg-type]
    assert EvicPressConfig.from_flags(None, path) == config
    assert EvicPressConfig.from_flags("hpt", path) == dataclasses.replace(config, policy="hpt")
    assert policy_in(path) == "lru"
    assert set(fields) == {field.name for field in dataclasses.fields(EvicPressConfig)}


def test_without_a_policy_there_is_nothing_to_configure(tmp_path: Path) -> None:
    path = _file(tmp_path, {"alpha": 1})
    assert policy_in(path) is None
    with pytest.raises(ValueError, match="no kv policy is given: expected --kv-policy, or"):
        EvicPressConfig.from_flags(None, path)


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, {"alpha": 2, "forms": "knorm@0.3", "sinks": 8, "min_tokens": 7})
    config = EvicPressConfig.from_flags("evicpress", path, alpha=0.5, forms="exact", sinks=0)
    assert (config.alpha, config.forms, config.sinks, config.min_tokens) == (0.5, (EXACT,), 0, 7)


def test_null_curves_are_the_prior(tmp_path: Path) -> None:
    assert EvicPressConfig.from_flags("evicpress", _file(tmp_path, {"curves": None})).curves is None


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"policy": "fifo"}, ("'fifo'", "evicpress, lru", "hpt", "PRESS@KEPT+lru")),
        ({"policy": "belady"}, ("'belady'", "evicpress, lru")),
        ({"policy": "lz4@0.5+lru"}, ("'lz4@0.5+lru'", "PRESS@KEPT+lru")),
        ({"policy": "impress@2"}, ("'impress@2'", "impress@X")),
        ({"half_life": 0}, ("half_life", "0", "above 0")),
        ({"half_life": -1}, ("half_life", "-1", "above 0")),
        ({"half_life": float("inf")}, ("half_life", "inf", "finite")),
        ({"half_life": float("nan")}, ("half_life", "nan", "finite")),
        ({"alpha": float("nan")}, ("alpha", "nan", "finite")),
        ({"alpha": float("inf")}, ("alpha", "inf", "finite")),
        ({"alpha": -0.1}, ("alpha", "-0.1", "at least 0")),
        ({"alpha": "much"}, ("alpha", "'much'", "a number")),
        ({"forms": ""}, ("''", "PRESS@KEPT")),
        ({"forms": "keydiff@0.5,"}, ("''", "PRESS@KEPT")),
        ({"forms": "lz4@0.5"}, ("'lz4@0.5'", "PRESS@KEPT")),
        ({"forms": "keydiff@2"}, ("'keydiff@2'", "PRESS@KEPT")),
        ({"min_tokens": 0}, ("min_tokens", "0", "at least 1")),
        ({"sinks": -1}, ("sinks", "-1", "at least 0")),
        ({"sinks": 1.5}, ("sinks", "1.5", "whole number")),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: dict[str, object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=".") as raised:
        EvicPressConfig.from_flags(**{"policy": "evicpress", **flags})  # type: ignore[arg-type]
    _is_one_sentence(str(raised.value), parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ("is not JSON", "JSON object")),
        ("", ("is not JSON", "JSON object")),
        ([1], ("list", "expected an object")),
        ({"alhpa": 1}, ("'alhpa'", "alpha, half_life, forms, min_tokens")),
        ({"policy": 3}, ("policy", "3", "a string")),
        ({"half_life": "10"}, ("half_life", "'10'", "a number")),
        ({"alpha": "1"}, ("alpha", "'1'", "a number")),
        ({"alpha": True}, ("alpha", "True", "a number")),
        ({"forms": 0.5}, ("forms", "0.5", "list")),
        ({"forms": [0.5]}, ("forms", "[0.5]", "list")),
        ({"forms": []}, ("forms", "at least one form")),
        ({"min_tokens": 1.0}, ("min_tokens", "1.0", "whole number")),
        ({"sinks": False}, ("sinks", "False", "whole number")),
        ({"window": 0}, ("window", "0", "at least 1")),
        ({"min_share": 1.5}, ("min_share", "1.5", "from 0 to 1")),
        ('{"half_life": 1' + "0" * 400 + "}", ("half_life", "over 1e308", "smaller")),
        ('{"half_life": 1' + "0" * 5000 + "}", ("is not JSON", "JSON object")),
        ("[" * 100_000, ("is not JSON", "JSON object")),
        ('{"min_share": NaN}', ("min_share", "nan", "from 0 to 1")),
        ({"prefill_fixed_s": -1}, ("prefill_fixed_s", "-1", "at least 0")),
        ({"prefill_per_token_s": None}, ("prefill_per_token_s", "None", "a number")),
        ({"curves": [1]}, ("curves", "list", "object")),
        ({"curves": {"lz4": {"0.5": 1}}}, ("'lz4'", "keydiff")),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, content: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=".") as raised:
        EvicPressConfig.from_flags(None if "policy" in parts else "evicpress", _file(tmp_path, content))
    _is_one_sentence(str(raised.value), parts)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    with pytest.raises(ValueError, match="does not exist") as raised:
        EvicPressConfig.from_flags("evicpress", path)
    _is_one_sentence(str(raised.value), (path,))


def test_a_file_that_is_not_readable_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"forms": "\xe9"}')
    for path in (tmp_path, tmp_path / "latin.json"):
        with pytest.raises(ValueError, match="cannot be read") as raised:
            EvicPressConfig.from_flags("evicpress", str(path))
        _is_one_sentence(str(raised.value), (str(path),))


def _is_one_sentence(text: str, parts: tuple[str, ...]) -> None:
    assert "\n" not in text
    assert [part for part in parts if part not in text] == []
