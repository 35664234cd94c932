"""The kv flags on ServerArgs: command line, config file, keywords of Engine, pickle, copies."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.releases import resolved, resolved_arguments

from sglang_evicpress import spawn
from sglang_evicpress.config import AUTO, EvicPressConfig
from sglang_evicpress.core import Form
from sglang_evicpress.flag_groups import ProfileFlags
from sglang_evicpress.flags import FLAGS, Flag
from sglang_evicpress.patches import hook_check, install, kv_flags, server_args
from sglang_evicpress.patches.compat import arguments_0_5_23
from sglang_evicpress.patches.compat.arguments import ARGUMENTS
from sglang_evicpress.patches.unsupported import UnsupportedError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NAMES = tuple(flag.name for flag in FLAGS)


@pytest.fixture(autouse=True)
def frontends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fields, without the HTTP hooks; how often those would have been installed."""
    from sglang.srt import server_args as sglang_server_args

    installed: list[str] = []
    monkeypatch.setattr(install, "install_frontend", lambda: installed.append("frontend"))
    monkeypatch.setattr(spawn, "requested", False)
    # SGLang configures the root logger with force=True, which would take pytest's handlers away.
    monkeypatch.setattr(sglang_server_args.logging, "basicConfig", lambda **_: None)
    server_args.add_flags()
    yield installed


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


def _make(model: str, **values: Any) -> Any:
    return resolved_arguments(model_path=model, device="cpu", **values)


def _from_command_line(*argv: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(list(argv))


def test_without_the_flag_nothing_changes(model: str, frontends: list[str]) -> None:
    args = _make(model)
    assert [getattr(args, name) for name in NAMES] == [None] * len(NAMES)
    assert ARGUMENTS.chosen(args).radix_cache_backend is None
    assert frontends == []
    assert pickle.loads(pickle.dumps(args)) == args
    assert not spawn.requested


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"kv_policy": "lru"}, "outlines"),
        ({"kv_policy": "lru", "grammar_backend": "xgrammar"}, "xgrammar"),
        ({"kv_policy": "lru", "enable_strict_thinking": True}, "xgrammar"),
        ({}, "xgrammar"),
    ],
)
def test_a_grammar_backend_that_works_on_the_cpu_is_chosen_where_none_is_given(
    model: str, frontends: list[str], given: dict[str, Any], chosen: str
) -> None:
    assert ARGUMENTS.chosen(_make(model, **given)).grammar_backend == chosen


def test_on_a_gpu_the_grammar_backend_is_left_to_sglang() -> None:
    assert server_args._grammar_backend(SimpleNamespace(device="cuda", enable_strict_thinking=False)) is None


def test_a_process_is_told_where_to_say_why_it_refuses(
    model: str, frontends: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spawn, "refusal_file", None)
    args = _make(model, kv_policy="lru")
    vars(args)["kv_refusal_file"] = str(tmp_path / "refusal")
    pickle.loads(pickle.dumps(args))
    assert spawn.refusal("no: do").code == 2
    assert (tmp_path / "refusal").read_text() == "no: do"


def test_the_flag_chooses_our_cache_and_an_attention_backend(model: str, frontends: list[str]) -> None:
    args = _make(model, kv_policy="evicpress")
    chosen = ARGUMENTS.chosen(args)
    assert (chosen.radix_cache_backend, chosen.attention_backend) == ("evicpress", "torch_native")
    assert frontends == ["frontend"]
    assert kv_flags.config_of(args) == EvicPressConfig("evicpress")


def test_auto_is_no_host_tier_where_it_is_refused_and_one_line_says_so(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger=server_args.logger.name):
        args = _make(model, kv_policy="lru", cuda_graph_backend_prefill="full")
    (line,) = (record.message for record in caplog.records if "auto is 0" in record.message)
    assert "--cuda-graph-backend-prefill full" in line
    assert not kv_flags.config_of(args).has_tiers
    assert not kv_flags.config_of(pickle.loads(pickle.dumps(args))).has_tiers, "nor in a scheduler process"
    assert kv_flags.config_of(_make(model, kv_policy="lru")).host_gb == AUTO


def test_an_attention_backend_that_was_asked_for_is_kept(model: str) -> None:
    args = _make(model, kv_policy="lru", attention_backend="triton")
    assert ARGUMENTS.chosen(args).attention_backend == "triton"


@pytest.mark.parametrize(("device", "backend"), [("cuda:0", "flashinfer"), ("cpu", "torch_native"), ("xpu", None)])
def test_the_default_attention_backend_of_a_device(device: str, backend: str | None) -> None:
    assert server_args._attention_backend(device) == backend


def test_without_flashinfer_it_is_triton_and_with_deterministic_inference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang turns its prefix cache off for flashinfer with deterministic inference."""
    assert server_args._attention_backend("cuda", is_deterministic=True) == "triton"
    monkeypatch.setenv("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    assert server_args._attention_backend("cuda") == "triton"


def test_each_process_is_told_by_the_arguments_it_is_handed(model: str) -> None:
    """Whatever the order in which a program builds them: nothing but the pickle decides."""
    stock, policy = _make(model), _make(model, kv_policy="evicpress")
    assert stock.radix_cache_backend is None
    pickle.loads(pickle.dumps(stock))
    assert not spawn.requested
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert spawn.requested


def test_flags_are_added_once() -> None:
    from sglang.srt.server_args import ServerArgs

    before = dict(vars(ServerArgs))
    server_args.add_flags()
    assert dict(vars(ServerArgs)) == before
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    taken = [action.dest for action in parser._actions]
    assert [taken.count(name) for name in NAMES] == [1] * len(NAMES)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_command_line_takes_every_flag(flag: Flag) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text, value = {bool: ((), True), int: (("3",), 3), float: (("2.5",), 2.5), str: (("x",), "x")}[flag.kind]
    assert getattr(parser.parse_args(["--model-path", "m", flag.option, *text]), flag.name) == value


def test_flags_and_the_file_become_one_config(model: str, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"window": 8, "alpha": 3}', encoding="utf-8")
    (tmp_path / "prior.json").write_text('{"knorm": {"0.5": 0.75}}', encoding="utf-8")
    files = ("--kv-policy-config", str(tmp_path / "policy.json"), "--kv-quality-curves", str(tmp_path / "prior.json"))
    numbers = ("--kv-host-gb", "0.5", "--kv-max-queue-seconds", "7.5", "--kv-sinks", "2")
    texts = ("--kv-policy", "evicpress", "--kv-forms", "knorm@0.5,exact", "--kv-ssd-allow-dir", "/mnt/a,/mnt/b")
    args = _from_command_line(
        "--model-path", model, "--device", "cpu", *files, *numbers, *texts, "--kv-disable-online-profiling"
    )
    assert kv_flags.config_of(args) == EvicPressConfig(
        "evicpress",
        alpha=3.0,
        forms=(Form("knorm", 0.5), Form()),
        sinks=2,
        window=8,
        host_gb=0.5,
        ssd_allow_dirs=("/mnt/a", "/mnt/b"),
        curves={"knorm": {"0.5": 0.75}},
        profiles=ProfileFlags(are_online=False),
        max_queue_s=7.5,
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_decode_budget": 20, "page_size": 16}, ("kv_decode_budget is 20", "at least 48")),
        ({"kv_decode_score": "snapkv"}, ("'snapkv'", "value_key_ratio")),
        ({"kv_decode_method": "quest"}, ("frees no memory",)),
        ({"kv_decode_budget": -1}, ("kv_decode_budget is -1",)),
        ({"kv_decode_protected_pages": "last"}, ("'last'",)),
        ({"kv_decode_client_budgets": "no"}, ("kv_decode_client_budgets is 'no'", "off, on, trace")),
    ],
)
def test_a_budget_that_cannot_be_kept_stops_the_start(
    model: str, given: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        _make(model, kv_policy="lru", **given)
    assert [word for word in words if word not in str(refused.value)] == []


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _from_command_line("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert [flag.option for flag in FLAGS if flag.option not in text] == []
    assert "evicpress, lru, lfu" in " ".join(text.split())


def test_a_config_file_of_sglang_takes_the_flags(model: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        f"model-path: {model}\ndevice: cpu\nkv-policy: lru\nkv-forms: exact\nkv-alpha: 2\n", encoding="utf-8"
    )
    args = _from_command_line("--config", str(path), "--kv-alpha", "0.25")
    assert (args.kv_policy, args.kv_forms, args.kv_alpha) == ("lru", "exact", 0.25)


def test_a_config_file_alone_chooses_the_policy(model: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"policy": "keydiff@0.5+lru", "alpha": 3}', encoding="utf-8")
    args = _make(model, kv_policy_config=str(path))
    assert (args.kv_policy, args.radix_cache_backend) == ("keydiff@0.5+lru", "evicpress")
    assert kv_flags.config_of(args) == EvicPressConfig("keydiff@0.5+lru", alpha=3.0)
    assert kv_flags.config_of(_make(model, kv_policy="hpt", kv_policy_config=str(path))).policy == "hpt"
    path.write_text('{"alpha": 3}', encoding="utf-8")
    with pytest.raises(UnsupportedError, match="--kv-policy-config does nothing without --kv-policy"):
        _make(model, kv_policy_config=str(path))


def test_pickle_keeps_class_and_values(model: str) -> None:
    args = _make(model, kv_policy="evicpress", kv_alpha=2.0)
    again = pickle.loads(pickle.dumps(args))
    assert type(again) is type(args)
    given = {name: getattr(again, name) for name in NAMES if getattr(again, name) is not None}
    assert given == {"kv_policy": "evicpress", "kv_alpha": 2.0}


def test_copies_know_the_flags(model: str) -> None:
    args = _make(model, kv_policy="evicpress", kv_sinks=1)
    again = copy.deepcopy(args)
    assert (again.kv_policy, again.kv_alpha, again.kv_sinks) == ("evicpress", None, 1)


@pytest.mark.skipif(ARGUMENTS is arguments_0_5_23, reason="ServerArgs of this SGLang is no dataclass")
def test_replace_and_asdict_know_the_fields(model: str) -> None:
    args = _make(model, kv_policy="evicpress", kv_sinks=1)
    again = dataclasses.replace(args, kv_alpha=3.0)
    assert (again.kv_policy, again.kv_alpha, again.kv_sinks) == ("evicpress", 3.0, 1)
    assert {name: dataclasses.asdict(again)[name] for name in NAMES} == {
        **dict.fromkeys(NAMES),
        "kv_policy": "evicpress",
        "kv_alpha": 3.0,
        "kv_sinks": 1,
    }


WRONG = [
    (
        ("--kv-policy", "evicpress", "--kv-alpha", "-1"),
        "alpha is -1.0: expected a finite number of at least 0",
    ),
    (("--kv-policy", "evicpress", "--kv-alpha", "nan"), "alpha is nan"),
    (
        ("--kv-policy", "evicpress", "--kv-alpha", "2", "--kv-quality", "0.9"),
        "quality is 0.9 and alpha 2: expected one",
    ),
    (("--kv-policy", "evicpress", "--kv-quality", "1.5"), "quality is 1.5: expected a number above 0, at most 1"),
    (("--kv-policy", "evicpress", "--kv-forms", "lz4@0.5"), "form 'lz4@0.5' is not known: expected"),
    (("--kv-policy", "evicpress", "--kv-policy-config", "/none.json"), "'/none.json' does not exist"),
    (("--kv-policy", "fifo"), "kv policy 'fifo' is not known: expected one of evicpress, lru"),
    (("--kv-alpha", "1"), "--kv-alpha does nothing without --kv-policy"),
    (("--kv-host-gb", "1"), "--kv-host-gb does nothing without --kv-policy"),
    (("--kv-policy", "lru", "--kv-host-gb", "-1"), "host_gb is -1.0: expected auto, 0 for no host tier, or"),
    (("--kv-policy", "lru", "--kv-ssd-dir", "/kv"), "ssd_dir is '/kv' without ssd_gb: expected"),
    (("--kv-policy", "lru", "--kv-ssd-gb", "1"), "ssd_gb is 1.0 without ssd_dir: give both"),
    (("--kv-policy", "lru", "--kv-ssd-fsync", "often"), "ssd_fsync is 'often': expected one of none, batch, always"),
    (
        ("--kv-policy", "lru", "--kv-ssd-allow-dir", "/kv", "--kv-ssd-key-file", "/etc/passwd"),
        "ssd_key_file '/etc/passwd' can be read by all or written by others (mode 0644): expected mode 0600",
    ),
    (("--kv-policy", "lru", "--kv-host-gb", "x"), "host_gb is 'x': expected auto, 0 for no host tier, or a number"),
    (
        ("--kv-policy", "lru", "--tp-size", "2", "--kv-decode-budget", "256", "--kv-decode-score", "tova"),
        "--kv-decode-score tova cannot be combined with --tp-size 2: that",
    ),
    (
        ("--kv-policy", "evicpress", "--kv-forms", "geometry@0.5"),
        "form geometry@0.5 is on the menu without geometry: give --kv-geometry FILE",
    ),
    (
        ("--kv-policy", "evicpress", "--kv-forms", "geometry@0.5", "--kv-geometry", "/none"),
        "geometry '/none' is no file: expected a file that evicpress calibrate geometry has written",
    ),
    (
        ("--kv-policy", "lru", "--disable-radix-cache"),
        "--kv-policy lru cannot be combined with --disable-radix-cache",
    ),
    (
        ("--kv-policy", "lru", "--speculative-algorithm", "NGRAM"),
        "combined with --speculative-algorithm NGRAM",
    ),
]


@pytest.mark.parametrize(("argv", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_refusal_is_one_line_and_status_2(
    model: str, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str, frontends: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _from_command_line("--model-path", model, "--device", "cpu", *argv)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("sglang: error: ")
    assert text in lines[0]
    assert frontends == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--kv-alpha", "much"), "much"),
        (("--kv-sinks", "1.5"), "1.5"),
    ],
)
def test_what_argparse_can_see_it_says(
    model: str, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _from_command_line("--model-path", model, *argv)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_program_gets_an_exception(model: str) -> None:
    with pytest.raises(UnsupportedError, match="kv policy 'fifo' is not known: expected one of evicpress, lru"):
        _make(model, kv_policy="fifo")
    with pytest.raises(UnsupportedError, match="--pp-size 2: pipeline stages"):
        _make(model, kv_policy="lru", pp_size=2)


def test_other_errors_of_the_command_line_stay_as_they_are(model: str) -> None:
    with pytest.raises(ValueError, match="ssl"):
        resolved(_from_command_line("--model-path", model, "--device", "cpu", "--ssl-keyfile", "only the key"))


def test_a_model_that_cannot_be_served_is_refused(model: str, frontends: list[str]) -> None:
    path = Path(model) / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"attention_chunk_size": 64}
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM.*chunked local attention"):
        _make(model, kv_policy="evicpress")
    assert frontends == []


def test_another_release_of_sglang_is_refused_only_with_the_flag(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_check, "sglang_version", lambda: "0.6.0")
    _make(model)
    with pytest.raises(UnsupportedError, match=r"found 0\.6\.0: install sglang=="):
        _make(model, kv_policy="evicpress")
