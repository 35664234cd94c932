"""From a config to the flags of each server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from sglang_evicpress.benchmark.config import KINDS, Config, load_config
from sglang_evicpress.benchmark.model import kv_bytes_per_token
from sglang_evicpress.benchmark.systems import (
    System,
    expand,
    left_out,
    profiling_system,
    sizes_of,
    stock_environment,
)

WORKING_SET, KV_BYTES = 100_000, 4_000


def make(folder: Path, **values: object) -> Config:
    given = {
        "model": "org/name",
        "server": ["--device", "cpu"],
        "contexts": {"command": "true"},
        "requests": 1,
        "memory": {"gpu": 0.1, "host": 0.25, "ssd": 1.0},
        "presses": ["keydiff", "snapkv"],
        "kept": [0.5, 0.2],
        "alphas": [0.1, 3],
        "qualities": [0.97],
        "profiles": {"questions": 2, "forms": "keydiff@0.5,knorm@0.2"},
        **values,
    }
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in given.items() if value is not None}))
    return load_config(path)


def systems(config: Config, folder: Path = Path("/out")) -> dict[str, System]:
    return {system.name: system for system in expand(config, sizes_of(config, WORKING_SET, KV_BYTES), folder)}


def value(flags: Sequence[str], flag: str) -> str:
    return flags[flags.index(flag) + 1]


def test_every_kind_expands_in_the_order_of_the_config(tmp_path: Path) -> None:
    assert list(systems(make(tmp_path))) == [
        *("full-cache", "prefill-only", "lru", "tiers-lru"),
        *("keydiff@0.5+lru", "keydiff@0.2+lru", "snapkv@0.5+lru", "snapkv@0.2+lru"),
        *("adaptcache", "impress@0.5", "evicpress a=0.1", "evicpress a=3", "evicpress q=0.97"),
        *("full-cache+attention", "prefill-only+attention", "lru+attention"),
    ]
    two = systems(make(tmp_path, systems=["evicpress", "lru"], qualities=[]))
    assert list(two) == ["evicpress a=0.1", "evicpress a=3", "lru"]


def test_extra_rates_are_of_systems_that_there_are(tmp_path: Path) -> None:
    def with_rates(*names: str) -> dict[str, System]:
        return systems(make(tmp_path, extra_rates=[{"rates": [8], "systems": list(names)}]))

    assert with_rates("fixed", "evicpress a=3", "hicache")  # which is left out here
    with pytest.raises(ValueError, match="c.yaml: extra_rates: systems has 'evicpress a=1': expected some of full-"):
        with_rates("lru", "evicpress a=1")


def test_stock_systems_have_no_flag_of_ours_and_every_plugin_but_ours(tmp_path: Path) -> None:
    found = systems(make(tmp_path, policy_flags=["--kv-sinks", "8"]))
    stock = [system for system in found.values() if system.is_stock]
    assert [system.name for system in stock] == ["full-cache", "prefill-only", "lru"]
    listed = {point.name for point in entry_points(group="sglang.srt.plugins")}
    for system in stock:
        assert not [flag for flag in system.flags if flag.startswith("--kv-")]
        assert set(system.env["SGLANG_PLUGINS"].split(",")) == (listed - {"evicpress"} or {"none"})
    assert "evicpress" in listed  # else leaving it out shows nothing
    assert all("SGLANG_PLUGINS" not in system.env for system in found.values() if not system.is_stock)


def test_all_have_the_same_pool_but_the_bound_that_holds_everything(tmp_path: Path) -> None:
    found = systems(make(tmp_path, tokens=3000, max_new_tokens=10))
    for system in found.values():
        assert system.pool_tokens == (125_000 + 16 * 3010 if system.kind.startswith("full-cache") else 10_000)
        assert value(system.flags, "--max-total-tokens") == str(system.pool_tokens)
        assert "--enable-cache-report" in system.flags
    assert "--disable-radix-cache" in found["prefill-only"].flags
    assert "--disable-radix-cache" not in found["lru"].flags


def test_controls_are_stock_but_for_our_attention(tmp_path: Path) -> None:
    found = systems(make(tmp_path, ssd_bandwidth=2e8))
    for name in ("full-cache", "prefill-only", "lru"):
        stock, control = found[name], found[f"{name}+attention"]
        assert control.flags == stock.flags and control.env == {"SGLANG_EVICPRESS": "attention"}
        assert not control.is_stock and not control.has_policy


def test_systems_of_ours_have_the_same_tiers_in_folders_of_their_own(tmp_path: Path) -> None:
    ours = [system for system in systems(make(tmp_path)).values() if system.has_policy]
    for system in ours:
        assert float(value(system.flags, "--kv-host-gb")) == 0.1
        assert float(value(system.flags, "--kv-ssd-gb")) == 0.4
        assert system.ssd_dir is not None and value(system.flags, "--kv-ssd-dir") == str(system.ssd_dir)
    assert len({system.ssd_dir for system in ours}) == len(ours)
    assert len({system.slug for system in ours}) == len(ours) == len(set(ours))
    assert all(system.slug == Path(system.slug).name and " " not in system.slug for system in ours)


def test_policies_are_told_apart_and_only_those_that_weigh_choose_forms(tmp_path: Path) -> None:
    found = systems(make(tmp_path, policy_flags=["--kv-sinks", "8"]))
    policies = {name: value(system.flags, "--kv-policy") for name, system in found.items() if system.has_policy}
    assert policies["tiers-lru"] == "lru" and policies["snapkv@0.2+lru"] == "snapkv@0.2+lru"
    assert policies["evicpress a=3"] == "evicpress" and policies["adaptcache"] == "adaptcache"
    for name, system in found.items():
        if not system.has_policy:
            continue
        learns = system.kind in ("adaptcache", "evicpress")
        assert value(system.flags, "--kv-forms") == ("keydiff@0.5,knorm@0.2" if learns else "exact"), name
        assert ("--kv-profile-path" in system.flags) == ("--kv-disable-online-profiling" in system.flags) == learns
        assert system.profiles == (Path("/out/profiles.log") if learns else None)
        assert value(system.flags, "--kv-sinks") == "8"
    evicpress, fixed = found["evicpress a=0.1"], found["keydiff@0.2+lru"]
    assert (value(evicpress.flags, "--kv-alpha"), evicpress.alpha, fixed.alpha) == ("0.1", 0.1, None)
    assert (fixed.press, fixed.kept, evicpress.press, evicpress.kept) == ("keydiff", 0.2, None, None)
    target = found["evicpress q=0.97"]
    assert value(target.flags, "--kv-quality") == "0.97" and "--kv-alpha" not in target.flags


def test_without_profiles_a_policy_makes_its_own_while_it_runs(tmp_path: Path) -> None:
    system = systems(make(tmp_path, profiles=None))["evicpress a=3"]
    assert value(system.flags, "--kv-forms") == "keydiff@0.5,keydiff@0.2,snapkv@0.5,snapkv@0.2"
    assert "--kv-profile-path" not in system.flags and "--kv-disable-online-profiling" not in system.flags


def test_profiling_has_the_pool_of_the_bound_and_writes_what_the_systems_read(tmp_path: Path) -> None:
    config = make(tmp_path)
    system = profiling_system(config, sizes_of(config, WORKING_SET, KV_BYTES), Path("/out"))
    found = systems(config)
    assert system.pool_tokens == found["full-cache"].pool_tokens and not system.is_stock and system.ssd_dir is None
    assert value(system.flags, "--kv-host-gb") == "0"
    assert system.profiles == found["adaptcache"].profiles == found["evicpress a=3"].profiles
    assert value(system.flags, "--kv-forms") == "keydiff@0.5,knorm@0.2"


def test_tiers_that_are_not_wanted_are_not_there(tmp_path: Path) -> None:
    host_only = systems(make(tmp_path, memory={"gpu": 0.1, "host": 0.25}))["tiers-lru"]
    assert "--kv-host-gb" in host_only.flags and "--kv-ssd-dir" not in host_only.flags and host_only.ssd_dir is None
    neither = systems(make(tmp_path, memory={"gpu": 0.1}))["tiers-lru"]
    assert value(neither.flags, "--kv-host-gb") == "0" and "--kv-ssd-dir" not in neither.flags


def test_an_ssd_is_slowed_where_there_is_one_of_ours(tmp_path: Path) -> None:
    found = systems(make(tmp_path, ssd_bandwidth=2e8))
    assert found["evicpress a=3"].env == {"SGLANG_EVICPRESS_FAULTS": "read=2e+08"}
    assert "SGLANG_EVICPRESS_FAULTS" not in found["lru"].env
    none = systems(make(tmp_path, ssd_bandwidth=2e8, memory={"gpu": 0.1, "host": 0.25}))
    assert none["evicpress a=3"].env == {}


def test_hicache_runs_where_cuda_is_with_the_same_shares_of_memory(tmp_path: Path) -> None:
    ((name, why),) = left_out(make(tmp_path)).items()
    assert name == "hicache" and "CUDA" in why
    assert left_out(make(tmp_path, systems=["lru"])) == {}
    config = make(tmp_path, server="--device=cuda:1")
    assert list(left_out(config)) == ["full-cache+attention", "prefill-only+attention", "lru+attention"]
    system = systems(config)["hicache"]
    assert system.is_stock and float(value(system.flags, "--hicache-ratio")) == 2.5
    assert system.env["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] == str(round(WORKING_SET * KV_BYTES))
    assert system.env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(system.ssd_dir)
    assert stock_environment().items() <= system.env.items()
    small = make(tmp_path, server="--device cuda", memory={"gpu": 0.3, "host": 0.25})
    assert "more host memory" in left_out(small)["hicache"] and "hicache" not in systems(small)


def test_sizes_are_shares_of_the_working_set(tmp_path: Path) -> None:
    sizes = sizes_of(make(tmp_path), WORKING_SET, KV_BYTES)
    assert (sizes.pool_tokens, sizes.host_bytes, sizes.ssd_bytes) == (10_000, 100_000_000, 400_000_000)
    with pytest.raises(ValueError, match="memory host of 1000 tokens, in GB, is 0.001: expected .* from 0.016"):
        sizes_of(make(tmp_path), 1000, KV_BYTES)


def test_records_are_json(tmp_path: Path) -> None:
    for system in systems(make(tmp_path)).values():
        record = json.loads(json.dumps(system.record()))
        assert record["name"] == system.name and record["flags"] == list(system.flags)
    assert {system.kind for system in systems(make(tmp_path)).values()} == set(KINDS) - {"hicache"}


@pytest.mark.parametrize(
    ("model", "server", "num_bytes"),
    [
        ({"dtype": "bfloat16"}, "", 2 * 3 * 2 * 64 * 2),
        ({"dtype": "float32"}, "", 2 * 3 * 2 * 64 * 2),  # SGLang serves it in half precision
        ({"torch_dtype": "float32"}, "--dtype float32", 2 * 3 * 2 * 64 * 4),
        ({"dtype": "float32"}, "--dtype float32 --kv-cache-dtype bf16", 2 * 3 * 2 * 64 * 2),
        ({"dtype": "bfloat16", "num_key_value_heads": None}, "", 2 * 3 * 4 * 64 * 2),
        ({"dtype": "bfloat16", "head_dim": None}, "", 2 * 3 * 2 * 32 * 2),
    ],
)
def test_bytes_of_kv_are_read_from_the_model(
    tmp_path: Path, model: dict[str, object], server: str, num_bytes: int
) -> None:
    whole = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    whole |= {"head_dim": 64, "hidden_size": 128, **model}
    for text in (whole, {"text_config": whole, "hidden_size": 9}):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(text))
        config = make(tmp_path, model="model", server=server)
        assert kv_bytes_per_token(config) == num_bytes
    assert kv_bytes_per_token(make(tmp_path, model="model", kv_bytes_per_token=7)) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "without the number of layers"), ("[", "config.json that can be read"), ("[]", "expected an object")]
    + [('{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "dtype": "fp8"}', "keep its KV as 'fp8'")],
)
def test_a_model_that_does_not_say_enough_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        kv_bytes_per_token(make(tmp_path, model="model"))
