"""The flags and the config file become one checked value, or one sentence that says what is accepted."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from sglang_evicpress import config as config_module
from sglang_evicpress.config import AUTO, DEFAULT_FORMS, EvicPressConfig, check_ssd_folder, policy_in
from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.flag_groups import DecodeFlags, LayerFlags, PrefillFlags, ProfileFlags, StoreFlags
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file
from sglang_evicpress.search.form_budgets import budget_name


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
    budgets = BudgetFile.of([3, 1], 20)
    write_budget_file(str(tmp_path / "found.json"), budgets)
    values = {
        "policy": "lru",
        "quality": None,
        "alpha": 2,
        "forms": ["knorm@0.3:uniform"],
        "layer_budget": str(tmp_path / "found.json"),
        "max_layer_counts": 2,
        "min_compress_tokens": 128,
        "sinks": 8,
        "window": 16,
        "min_match_kept": 0.25,
        "curves": {"knorm": {"0.3": 0.9}},
        "geometry": "/models/geometry.safetensors",
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
        "external_backend": "file",
        "external_config": {"file_storage_path": "/mnt/kv"},
        "profile_path": str(tmp_path / "profiles.sqlite"),
        "drift_threshold": 0.2,
        "online_profiling": False,
        "tenants": {"acme": {"cache_salt": "a", "kv_quality": 0.9}},
        "slot_checks": 0.01,
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
    shares = {budget_name("found.json", budgets): budgets.shares}
    fields["layers"] = LayerFlags(fields.pop("layer_budget"), fields.pop("max_layer_counts"), shares)  # type: ignore[arg-type]
    stores = [fields.pop(name) for name in ("external_backend", "external_config", "ssd_key_file")]
    fields["stores"] = StoreFlags(*stores)  # type: ignore[arg-type]
    profiles = [fields.pop(name) for name in ("profile_path", "drift_threshold", "online_profiling")]
    fields["profiles"] = ProfileFlags(*profiles)  # type: ignore[arg-type]
    prefill = {name: fields.pop(f"prefill_{name}") for name in PrefillFlags.__dataclass_fields__}
    fields["prefill"] = PrefillFlags(**prefill)  # type: ignore[arg-type]
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


def test_a_prior_and_curves_are_one_too_many(tmp_path: Path) -> None:
    quality_curves = tmp_path / "prior.json"
    quality_curves.write_text('{"keydiff": {"0.5": 0.9}}')
    path = _file(tmp_path, {"policy": "evicpress", "curves": {"knorm": {"0.3": 0.9}}})
    with pytest.raises(ValueError, match="quality_curves and curves are both given"):
        EvicPressConfig.from_flags(None, path, quality_curves=str(quality_curves))


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
    monkeypatch.setattr(config_module, "memory_bytes", lambda: 8_000_000_000)
    assert EvicPressConfig.from_flags("lru", host_gb=8).host_bytes == 8_000_000_000
    with pytest.raises(ValueError, match="host_gb") as raised:
        EvicPressConfig.from_flags("lru", host_gb=8.1)
    _is_one_sentence(str(raised.value), ("8.1", "8.0 GB of memory", "less"))


def test_the_memory_of_this_machine_is_known() -> None:
    assert 1e8 < config_module.memory_bytes() < 1e15


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
