"""The flags and the config file become one checked value, or one sentence that says what is accepted."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest

from sglang_evicpress import config as config_module
from sglang_evicpress.config import AUTO, DEFAULT_FORMS, DecodeFlags, EvicPressConfig, check_ssd_folder, policy_in
from sglang_evicpress.core import EXACT, Form


def _file(folder: Path, content: object) -> str:
    path = folder / "policy.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


POLICIES = (
    *("evicpress", "lru", "lfu", "slru", "tlru", "hpt", "gdsf", "s3fifo", "sieve", "adaptcache"),
    *("keydiff@0.5+lru", "impress@0.1"),
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_alone_has_the_defaults(policy: str) -> None:
    assert EvicPressConfig.from_flags(policy) == EvicPressConfig(policy)
    assert EvicPressConfig(policy).forms == DEFAULT_FORMS == tuple(map(Form.parse_stored, map(str, DEFAULT_FORMS)))


def test_a_policy_brings_its_form_to_the_menu() -> None:
    forms = (Form("knorm", 0.5), EXACT)
    assert EvicPressConfig("evicpress", forms=forms).menu_forms == forms
    assert EvicPressConfig("keydiff@0.7+lru", forms=forms).menu_forms == (*forms, Form("keydiff", 0.7))
    assert EvicPressConfig("knorm@0.5+lru", forms=forms).menu_forms == forms


def test_forms_with_a_codec_are_for_tiers_below_the_gpu() -> None:
    forms = (Form("knorm", 0.5), Form("knorm", 0.5, "int8"))
    assert EvicPressConfig("evicpress", forms=forms, host_gb=0.0).menu_forms == forms[:1]
    assert EvicPressConfig("evicpress", forms=forms, host_gb=1.0).menu_forms == forms


def test_flags_are_taken() -> None:
    config = EvicPressConfig.from_flags(
        "evicpress", alpha=0, forms="keydiff@0.5, exact,keydiff@0.5", min_compress_tokens=1, sinks=0
    )
    assert config == EvicPressConfig(
        "evicpress", alpha=0.0, forms=(Form("keydiff", 0.5), EXACT), min_compress_tokens=1, sinks=0
    )


def test_a_file_may_give_every_field(tmp_path: Path) -> None:
    values = {
        "policy": "lru",
        "quality": None,
        "alpha": 2,
        "forms": ["knorm@0.3"],
        "min_compress_tokens": 128,
        "sinks": 8,
        "window": 16,
        "min_match_kept": 0.25,
        "curves": {"knorm": {"0.3": 0.9}},
        "prefill_fixed_s": 0.01,
        "prefill_per_token_s": 0.002,
        "prefill_per_pair_s": 1e-7,
        "host_gb": 0.5,
        "ssd_dir": str(tmp_path / "kv"),
        "ssd_gb": 20,
        "ssd_write_gb_per_day": 100,
        "ssd_fsync": "always",
        "ssd_allow_dir": ["/mnt/a", "/mnt/b"],
        "ssd_key_file": "/etc/evicpress.key",
        "profile_path": str(tmp_path / "profiles.sqlite"),
        "drift_threshold": 0.2,
        "online_profiling": False,
        "tenants": {"acme": {"cache_salt": "a", "kv_quality": 0.9}},
        "decode_budget": 512,
        "decode_method": "compact",
        "decode_score": "keydiff",
        "decode_interval": 64,
        "decode_protected_pages": "first",
        "decode_client_budgets": "off",
        "max_queue_seconds": 7.5,
    }
    path = _file(tmp_path, values)
    renamed = {"ssd_allow_dir": "ssd_allow_dirs", "max_queue_seconds": "max_queue_s"}
    fields = {renamed.get(name, name): value for name, value in values.items()}
    decode = {name: fields.pop(f"decode_{name}") for name in DecodeFlags.__dataclass_fields__}
    fields |= {"forms": (Form("knorm", 0.3),), "ssd_allow_dirs": ("/mnt/a", "/mnt/b"), "decode": DecodeFlags(**decode)}  # type: ignore[arg-type]
    config = EvicPressConfig(**fields)  # type: ignore[arg-type]
    assert EvicPressConfig.from_flags(None, path) == config
    assert EvicPressConfig.from_flags("hpt", path) == dataclasses.replace(config, policy="hpt")
    assert policy_in(path) == "lru"
    assert set(fields) == {field.name for field in dataclasses.fields(EvicPressConfig)}


def test_a_prior_is_read_from_its_file(tmp_path: Path) -> None:
    quality_curves = tmp_path / "prior.json"
    quality_curves.write_text('{"keydiff": {"0.5": 0.9}}')
    assert EvicPressConfig.from_flags("evicpress", quality_curves=str(quality_curves)).curves == {
        "keydiff": {"0.5": 0.9}
    }
    assert EvicPressConfig.from_flags("evicpress").curves is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("does not exist", "expected a JSON file")),
        ("{", ("not JSON", "expected quality curves")),
        ("null", ("are None", "expected an object")),
        ("[]", ("are []", "expected an object")),
        ('{"zip": {"0.5": 0.9}}', ("'zip'", "expected one of")),
        ('{"keydiff": {"0.5": 2}}', ("is 2", "expected a number in [0, 1]")),
    ],
)
def test_a_wrong_prior_is_one_sentence_that_names_the_file(
    tmp_path: Path, content: str | None, words: tuple[str, ...]
) -> None:
    quality_curves = tmp_path / "prior.json"
    if content is not None:
        quality_curves.write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(quality_curves))) as caught:
        EvicPressConfig.from_flags("evicpress", quality_curves=str(quality_curves))
    assert all(word in str(caught.value) for word in words)


def test_a_prior_and_curves_are_one_too_many(tmp_path: Path) -> None:
    quality_curves = tmp_path / "prior.json"
    quality_curves.write_text('{"keydiff": {"0.5": 0.9}}')
    path = _file(tmp_path, {"policy": "evicpress", "curves": {"knorm": {"0.3": 0.9}}})
    with pytest.raises(ValueError, match="quality_curves and curves are both given"):
        EvicPressConfig.from_flags(None, path, quality_curves=str(quality_curves))


@pytest.mark.parametrize(
    ("flag", "value"),
    [("drift_threshold", 0.0), ("drift_threshold", 1.5), ("drift_threshold", math.nan), ("profile_path", " ")],
)
def test_profiling_flags_out_of_range_are_refused(flag: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{flag} is .*expected"):
        EvicPressConfig.from_flags("evicpress", **{flag: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "online_profiling", "is_online"),
    [("evicpress", None, True), ("adaptcache", None, True), ("evicpress", False, False), ("lru", None, False)],
)
def test_only_policies_that_weigh_quality_profile_online(
    policy: str, online_profiling: bool | None, is_online: bool
) -> None:
    assert EvicPressConfig.from_flags(policy, online_profiling=online_profiling).profiles_online is is_online


def test_alpha_is_tuned_for_a_quality_unless_it_is_given() -> None:
    default, asked, fixed = (
        EvicPressConfig.from_flags("evicpress", **flags) for flags in ({}, {"quality": 0.9}, {"alpha": 3})
    )  # type: ignore[arg-type]
    assert (default.target_quality, asked.target_quality, fixed.target_quality) == (0.97, 0.9, None)
    assert (default.start_alpha, fixed.start_alpha) == (1.0, 3.0)
    for policy in ("lru", "adaptcache"):
        assert EvicPressConfig(policy).target_quality is None


@pytest.mark.parametrize(
    ("policy", "flags", "words"),
    [
        ("evicpress", {"quality": 0.9, "alpha": 2}, "quality is 0.9 and alpha 2: expected one of them"),
        ("lru", {"quality": 0.9}, "quality is 0.9 with policy 'lru': expected evicpress"),
        ("keydiff@0.5+lru", {"quality": 1}, "quality is 1 with policy 'keydiff@0.5+lru': expected evicpress"),
        ("evicpress", {"quality": 0}, "quality is 0: expected a number above 0, at most 1"),
        ("evicpress", {"quality": 1.1}, "quality is 1.1: expected a number above 0, at most 1"),
        ("evicpress", {"quality": math.nan}, "quality is nan: expected a number above 0, at most 1"),
    ],
)
def test_a_quality_that_cannot_be_held_is_refused(policy: str, flags: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        EvicPressConfig.from_flags(policy, **flags)  # type: ignore[arg-type]


def test_a_quality_or_an_alpha_wins_over_the_other_in_a_file(tmp_path: Path) -> None:
    alpha = _file(tmp_path, {"policy": "evicpress", "alpha": 3})
    assert EvicPressConfig.from_flags(None, alpha, quality=0.9) == EvicPressConfig("evicpress", quality=0.9)
    quality = _file(tmp_path, {"policy": "evicpress", "quality": 0.9})
    assert EvicPressConfig.from_flags(None, quality, alpha=3) == EvicPressConfig("evicpress", alpha=3.0)
    both = _file(tmp_path, {"policy": "evicpress", "quality": 0.9, "alpha": 3})
    with pytest.raises(ValueError, match="expected one of them"):
        EvicPressConfig.from_flags(None, both)


def test_a_quality_of_1_leaves_the_forms_that_lose_nothing() -> None:
    forms = (Form("knorm", 0.5), Form(codec="int8"), Form(codec="lossless"), EXACT)
    config = EvicPressConfig("evicpress", quality=1.0, forms=forms, host_gb=1.0)
    assert config.menu_forms == (Form(codec="lossless"), EXACT)
    assert not config.profiles_online
    assert EvicPressConfig("evicpress", quality=0.99, forms=forms, host_gb=1.0).menu_forms == forms


def test_without_a_policy_there_is_nothing_to_configure(tmp_path: Path) -> None:
    path = _file(tmp_path, {"alpha": 1})
    assert policy_in(path) is None
    with pytest.raises(ValueError, match="no kv policy is given: expected --kv-policy, or"):
        EvicPressConfig.from_flags(None, path)


def test_without_tiers_nothing_is_kept_below_the_gpu() -> None:
    config = EvicPressConfig.from_flags("evicpress", host_gb=0)
    assert config == EvicPressConfig("evicpress", host_gb=0.0)
    assert (config.has_tiers, config.host_bytes, config.ssd_bytes, config.ssd_fsync) == (False, 0, 0, "batch")


def test_a_gigabyte_is_a_billion_bytes_as_sglang_counts(tmp_path: Path) -> None:
    config = EvicPressConfig.from_flags("evicpress", host_gb=0.25, ssd_dir=str(tmp_path), ssd_gb=1.5)
    assert (config.has_tiers, config.host_bytes, config.ssd_bytes) == (True, 250_000_000, 1_500_000_000)
    assert config.ssd_write_gb_per_day is None
    assert EvicPressConfig.from_flags("evicpress", host_gb=0.25).ssd_bytes == 0


def test_there_is_a_host_tier_whose_size_is_to_be_chosen_by_default(tmp_path: Path) -> None:
    path = _file(tmp_path, {"host_gb": "auto"})
    for config in (EvicPressConfig.from_flags("lru"), EvicPressConfig.from_flags("lru", path), EvicPressConfig("lru")):
        assert config.host_gb == AUTO and config.has_tiers
    with pytest.raises(RuntimeError, match="host_gb is auto"):
        _ = config.host_bytes
    assert EvicPressConfig.from_flags("lru", path, host_gb="0.5").host_bytes == 500_000_000
    assert EvicPressConfig.from_flags("lru", _file(tmp_path, {"host_gb": 2}), host_gb="auto").host_gb == AUTO
    assert EvicPressConfig.from_flags("lru", ssd_dir=str(tmp_path), ssd_gb=2.0).host_gb == AUTO


def test_a_file_says_numbers_as_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host_gb is '2': expected auto, 0 for no host tier, or a number"):
        EvicPressConfig.from_flags("lru", _file(tmp_path, {"host_gb": "2"}))


def test_more_host_memory_than_the_machine_has_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_memory_bytes", lambda: 8_000_000_000)
    assert EvicPressConfig.from_flags("lru", host_gb=8).host_bytes == 8_000_000_000
    with pytest.raises(ValueError, match="host_gb") as raised:
        EvicPressConfig.from_flags("lru", host_gb=8.1)
    _is_one_sentence(str(raised.value), ("8.1", "8.0 GB of memory", "less"))


def test_the_memory_of_this_machine_is_known() -> None:
    assert 1e8 < config_module._memory_bytes() < 1e15


def test_an_ssd_folder_may_be_made_later(tmp_path: Path) -> None:
    check_ssd_folder(str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("folder", "parts"), [("file", ("is not a folder",)), ("file/kv", ("lies below", "file"))])
def test_an_ssd_folder_that_cannot_be_one_is_one_sentence(tmp_path: Path, folder: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("not a folder")
    path = str(tmp_path / folder)
    with pytest.raises(ValueError, match="ssd_dir") as raised:
        EvicPressConfig.from_flags("evicpress", ssd_dir=path, ssd_gb=1)
    _is_one_sentence(str(raised.value), (path, *parts))


@pytest.mark.parametrize(("folder", "what"), [("", "is not writable"), ("kv", "cannot be made, because")])
def test_an_ssd_folder_must_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, what: str
) -> None:
    """Asked of the system, which lets the superuser write anywhere."""
    real, path = os.access, str(tmp_path / folder) if folder else str(tmp_path)
    monkeypatch.setattr(os, "access", lambda where, mode: real(where, mode) and not mode & os.W_OK)
    with pytest.raises(ValueError, match="ssd_dir") as raised:
        EvicPressConfig.from_flags("evicpress", ssd_dir=path, ssd_gb=1)
    _is_one_sentence(str(raised.value), (path, what, str(tmp_path)))


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, {"alpha": 2, "forms": "knorm@0.3", "sinks": 8, "min_compress_tokens": 7})
    config = EvicPressConfig.from_flags("evicpress", path, alpha=0.5, forms="exact", sinks=0)
    assert (config.alpha, config.forms, config.sinks, config.min_compress_tokens) == (0.5, (EXACT,), 0, 7)


def test_null_curves_are_the_prior(tmp_path: Path) -> None:
    assert EvicPressConfig.from_flags("evicpress", _file(tmp_path, {"curves": None})).curves is None


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"policy": "fifo"}, ("'fifo'", "evicpress, lru", "hpt", "PRESS@KEPT+lru")),
        ({"policy": "belady"}, ("'belady'", "evicpress, lru")),
        ({"policy": "lz4@0.5+lru"}, ("'lz4@0.5+lru'", "PRESS@KEPT+lru")),
        ({"policy": "impress@2"}, ("'impress@2'", "impress@X")),
        ({"max_queue_seconds": 0}, ("max_queue_seconds", "0", "above 0")),
        ({"max_queue_seconds": float("nan")}, ("max_queue_seconds", "nan", "finite")),
        ({"max_queue_seconds": 0}, ("max_queue_seconds", "0", "above 0")),
        ({"alpha": float("nan")}, ("alpha", "nan", "finite")),
        ({"alpha": -0.1}, ("alpha", "-0.1", "at least 0")),
        ({"alpha": "much"}, ("alpha", "'much'", "number")),
        ({"forms": ""}, ("''", "PRESS@KEPT")),
        ({"forms": "lz4@0.5"}, ("'lz4@0.5'", "PRESS@KEPT")),
        ({"min_compress_tokens": 0}, ("min_compress_tokens", "0", "at least 1")),
        ({"sinks": -1}, ("sinks", "-1", "at least 0")),
        ({"sinks": 1.5}, ("sinks", "1.5", "whole number")),
        ({"host_gb": -1}, ("host_gb", "-1", "0 for no host tier", "0.016")),
        ({"host_gb": float("nan")}, ("host_gb", "nan", "0.016")),
        ({"host_gb": "x"}, ("host_gb is 'x'", "auto, 0 for no host tier, or a number of GB")),
        ({"host_gb": "nan"}, ("host_gb", "nan", "0.016")),
        ({"host_gb": 0.0159}, ("host_gb", "0.0159", "from 0.016")),
        ({"ssd_dir": "/kv"}, ("'/kv'", "without ssd_gb", "GB")),
        ({"ssd_dir": "", "ssd_gb": 1}, ("''", "no path", "folder")),
        ({"ssd_dir": "/kv\0", "ssd_gb": 1}, ("no path", "folder")),
        ({"ssd_dir": "/kv", "ssd_gb": 0}, ("ssd_gb", "0.0", "from 0.016")),
        ({"ssd_dir": "/kv", "ssd_gb": float("nan")}, ("ssd_gb", "nan", "from 0.016")),
        ({"ssd_dir": "/kv", "ssd_gb": 1, "host_gb": 0}, ("host_gb is 0", "'/kv'", "0.016")),
        ({"ssd_gb": 5}, ("ssd_gb", "5.0", "without ssd_dir", "leave out ssd_gb")),
        ({"ssd_write_gb_per_day": 5}, ("ssd_write_gb_per_day", "5.0", "without ssd_dir")),
        ({"ssd_dir": "/kv", "ssd_gb": 1, "ssd_write_gb_per_day": 0}, ("ssd_write_gb_per_day", "0", "above 0")),
        ({"ssd_dir": "/kv", "ssd_gb": 1, "ssd_write_gb_per_day": float("nan")}, ("nan", "above 0")),
        ({"ssd_allow_dir": "/kv,kv"}, ("ssd_allow_dir 'kv'", "absolute")),
        ({"ssd_allow_dir": ""}, ("ssd_allow_dir ''", "absolute")),
        ({"ssd_key_file": "", "ssd_allow_dir": "/kv"}, ("ssd_key_file is ''", "path of a file")),
        ({"ssd_key_file": "/key"}, ("'/key'", "without ssd_dir and ssd_allow_dir")),
        ({"ssd_fsync": "often"}, ("ssd_fsync", "'often'", "none, batch, always")),
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
        ({"alhpa": 1}, ("'alhpa'", "alpha, forms, min_compress_tokens")),
        ({"policy": 3}, ("policy", "3", "a string")),
        ({"max_queue_seconds": "10"}, ("max_queue_seconds", "'10'", "expected finite seconds")),
        ({"alpha": True}, ("alpha", "True", "number")),
        ({"forms": [0.5]}, ("forms", "[0.5]", "list")),
        ({"forms": []}, ("forms", "at least one form")),
        ({"min_compress_tokens": 1.0}, ("min_compress_tokens", "1.0", "whole number")),
        ({"sinks": False}, ("sinks", "False", "whole number")),
        ({"window": 0}, ("window", "0", "at least 1")),
        ({"min_match_kept": 1.5}, ("min_match_kept", "1.5", "from 0 to 1")),
        ('{"max_queue_seconds": 1' + "0" * 400 + "}", ("max_queue_seconds", "1000", "finite seconds")),
        ('{"alpha": 1' + "0" * 5000 + "}", ("is not JSON", "JSON object")),
        ("[" * 100_000, ("is not JSON", "JSON object")),
        ('{"min_match_kept": NaN}', ("min_match_kept", "nan", "from 0 to 1")),
        ({"prefill_fixed_s": -1}, ("prefill_fixed_s", "-1", "at least 0")),
        ({"prefill_per_token_s": None}, ("prefill_per_token_s", "None", "number")),
        ({"curves": [1]}, ("curves", "[1]", "object")),
        ({"ssd_dir": 8}, ("ssd_dir", "8", "a string")),
        ({"ssd_fsync": None}, ("ssd_fsync", "None", "one of none")),
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
