"""Configs of benchmarks: what a file may say, and what is said of one that is wrong."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from sglang_evicpress.benchmark.config import DEFAULT_KEPT, DEFAULT_PRESSES, KINDS, Config, Memory, load_config
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file

ROOT = Path(__file__).parents[3]
LEAST = {"model": "org/name", "contexts": {"command": ["python", "-c", "0"]}, "requests": 5, "memory": {"gpu": 0.1}}


def load(folder: Path, **values: object) -> Config:
    """``LEAST`` with ``values`` over it; a value of None takes the key away."""
    path = folder / "this.yaml"
    given = {key: value for key, value in {**LEAST, **values}.items() if value is not None}
    path.write_text(yaml.safe_dump(given))
    return load_config(path)


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.name, config.model, config.server, config.workload.template) == (
        "this",
        "org/name",
        (),
        "{context}\n\n{question}",
    )
    assert (config.rates, config.repetitions, config.workload.warm_up, config.workload.trace) == ((0.0,), 1, 1, None)
    assert (config.presses, config.kept, config.systems) == (DEFAULT_PRESSES, DEFAULT_KEPT, KINDS)
    assert config.memory == Memory(gpu=0.1)
    assert (
        config.workload.contexts.arguments == (sys.executable, "-c", "0")
        and config.workload.contexts.folder == tmp_path.resolve()
    )


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c.jsonl").touch()
    (tmp_path / "in" / "t.csv").write_text("1\n2\n")
    config = load(tmp_path, model="model", contexts={"file": "in/c.jsonl"}, arrivals="trace in/t.csv")
    assert config.model == str(tmp_path / "model")
    assert (
        config.workload.contexts.file == tmp_path / "in" / "c.jsonl"
        and config.workload.trace == tmp_path / "in" / "t.csv"
    )
    config = load(tmp_path, contexts={"command": "python -m x --tokens '1 2'", "folder": "in"})
    assert config.workload.contexts.folder == tmp_path / "in"
    assert config.workload.contexts.command[1:] == ("-m", "x", "--tokens", "1 2")


def test_flags_are_a_list_or_a_line_and_variables_are_texts(tmp_path: Path) -> None:
    listed = load(tmp_path, server=["--context-length", 4096, "--x=a b"], env={"N": 1, "S": "no"})
    assert listed.server == ("--context-length", "4096", "--x=a b") and listed.env == {"N": "1", "S": "no"}
    assert load(tmp_path, server="--context-length 4096 '--x=a b'").server == listed.server


def test_forms_are_those_of_profiling_else_every_press_with_every_fraction(tmp_path: Path) -> None:
    grid = {"presses": ["knorm", "snapkv"], "kept": [0.5, 0.25]}
    every = "knorm@0.5,knorm@0.25,snapkv@0.5,snapkv@0.25"
    assert load(tmp_path, **grid).forms == every
    assert load(tmp_path, **grid, profiles={"questions": 3}).forms == every
    assert load(tmp_path, **grid, profiles={"questions": 3, "forms": "keydiff@0.1, knorm@0.2"}).forms == (
        "keydiff@0.1,knorm@0.2"
    )


def test_the_record_is_json_and_the_identity_leaves_out_which_systems_run(tmp_path: Path) -> None:
    config = load(tmp_path, profiles={"questions": 2, "forms": "keydiff@0.5"})
    assert json.loads(json.dumps(config.record())) == config.record()
    same = load(
        tmp_path,
        profiles={"questions": 2, "forms": "keydiff@0.5"},
        **{"repetitions": 3, "systems": ["lru"], "once": ["lru"], "alphas": [7], "presses": ["knorm"], "name": "b"},
    )
    assert same.identity() == config.identity() and same.record() != config.record()
    for changed in ({"seed": 1}, {"rates": [1]}, {"requests": 6}, {"memory": {"gpu": 0.2}}):
        other = load(tmp_path, profiles={"questions": 2, "forms": "keydiff@0.5"}, **changed)
        assert other.identity() != config.identity()
    assert load(tmp_path, kept=[0.5]).identity() != load(tmp_path, kept=[0.4]).identity()  # without profiles: its forms


def test_the_identity_has_the_content_of_the_files_that_are_named(tmp_path: Path) -> None:
    assert "files_sha256" not in load(tmp_path).identity()  # as in folders of earlier versions
    (tmp_path / "t.csv").write_text("1\n2\n")
    (tmp_path / "prior.json").write_text("{}")
    write_budget_file(str(tmp_path / "b.json"), BudgetFile((0.5, 1.5), 10, {}))
    given = {
        "arrivals": "trace t.csv",
        "profiles": {"questions": 1, "forms": ["knorm@0.5:b.json", "knorm@0.2:pyramid"]},
        "policy_flags": ["--kv-sinks", "8", "--kv-quality-curves=prior.json"],
    }
    config = load(tmp_path, **given)
    assert config.workload.trace_s == (1.0, 2.0)
    digests = {
        str(tmp_path / name): sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("t.csv", "b.json", "prior.json")
    }
    assert config.identity()["files_sha256"] == digests
    assert load(tmp_path, **given).identity() == config.identity()
    (tmp_path / "t.csv").write_text("1\n3\n")
    assert load(tmp_path, **given).identity() != config.identity()
    assert load(tmp_path, **given).files_sha256 == config.files_sha256  # which profiles depend on
    write_budget_file(str(tmp_path / "b.json"), BudgetFile((1.5, 0.5), 10, {}))
    assert load(tmp_path, **given).files_sha256 != config.files_sha256


def test_a_trace_with_a_bad_line_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1\n2\nlater\n")
    with pytest.raises(ValueError, match="this.yaml: .*t.csv line 3 begins with 'later': expected a time"):
        load(tmp_path, arrivals="trace t.csv")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": None}, "has no model: expected a folder"),
        ({"requests": None}, "has no requests: expected a whole number"),
        ({"memory": None}, "has no memory: expected gpu, host and ssd"),
        ({"contexts": None}, "has no contexts: expected file or command"),
        ({"model": "./gone"}, "model is './gone': expected a folder"),
        ({"nme": "x"}, "has the unknown key 'nme': expected .*name"),
        ({"name": "a/b"}, "name is 'a/b': expected a name"),
        ({"requests": 0}, "requests is 0: expected a whole number of at least 1"),
        ({"requests": True}, "requests is True: expected"),
        ({"requests": 1.5}, "requests is 1.5: expected"),
        ({"seed": -1}, "seed is -1: expected"),
        ({"popularity": -0.1}, "popularity is -0.1: expected an exponent"),
        ({"popularity": float("nan")}, "popularity is nan: expected"),
        ({"rates": []}, r"rates is \[\]: expected a list of requests/s"),
        ({"rates": [1, 1]}, r"rates is \[1, 1\]: expected"),
        ({"rates": 2}, "rates is 2: expected"),
        ({"kept": [1.0]}, r"kept is \[1.0\]: expected a list of numbers above 0, below 1"),
        ({"presses": ["zip"]}, r"presses is \['zip'\]: expected a list of keydiff"),
        ({"systems": ["lru", "evict"]}, r"systems is \['lru', 'evict'\]: expected a list of full-cache"),
        ({"once": ["none"]}, r"once is \['none'\]: expected"),
        ({"alphas": [-1]}, r"alphas is \[-1\]: expected"),
        ({"qualities": [1.5]}, r"qualities is \[1.5\]: expected a list of numbers above 0, at most 1"),
        ({"warm_up": "twice"}, "warm_up is 'twice': expected how often each context is asked about, a whole"),
        ({"arrivals": "uniform"}, "arrivals is 'uniform': expected poisson, gamma SHAPE .*, or trace FILE.csv"),
        ({"arrivals": "trace gone.csv"}, "arrivals is 'trace gone.csv': expected"),
        ({"template": "{question} {context}"}, "template is .*: expected a text with {context}"),
        ({"contexts": {}}, "contexts is {}: expected either file or command"),
        ({"contexts": {"file": "gone.jsonl"}}, "contexts: file is 'gone.jsonl': expected a JSONL file"),
        ({"contexts": {"command": ["x"], "folder": "gone"}}, "contexts: folder is 'gone': expected a folder"),
        ({"contexts": "x.jsonl"}, "contexts is 'x.jsonl': expected file or command"),
        ({"memory": {"gpu": 0}}, "memory: gpu is 0: expected a share"),
        ({"memory": {"host": 1}}, "memory has no gpu: expected a share"),
        ({"memory": {"gpu": 1, "ssd": 1}}, "memory: host is 0 with ssd 1"),
        ({"memory": {"gpu": 1, "disk": 1}}, "memory has the unknown key 'disk': expected gpu, host, ssd"),
        ({"profiles": {"questions": 0}}, "profiles: questions is 0"),
        ({"profiles": {"questions": 2, "forms": "exact"}}, "profiles: forms is 'exact': expected compressed forms"),
        ({"env": {"A": True}}, "env is {'A': True}: expected a mapping"),
        ({"server": [["--a"]]}, "server is .*: expected flags"),
        ({"server": "--a 'b"}, "server is .*: expected flags"),
        ({"server": ["--port", 1]}, "server has '--port', which the benchmark gives"),
        ({"server": ["--kv-policy=lru"]}, "server has '--kv-policy=lru', which the benchmark gives"),
        ({"server": ["--max-total", 1]}, "server has '--max-total', which the benchmark gives"),
        ({"policy_flags": ["--kv-alpha", 7]}, "policy_flags has '--kv-alpha', which the benchmark gives"),
        ({"policy_flags": "--kv-sinks 8 --max-total-tokens=9"}, "policy_flags has '--max-total-tokens=9', which the"),
        ({"ssd_bandwidth": 0}, "ssd_bandwidth is 0: expected bytes/s"),
    ],
)
def test_an_error_names_the_file_the_key_the_value_and_what_is_accepted(
    tmp_path: Path, values: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        load(tmp_path, **values)
    assert str(tmp_path / "this.yaml") in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_of_yaml_that_is_a_text_is_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, ssd_bandwidth="2e8").ssd_bandwidth == 2e8


@pytest.mark.parametrize(("text", "said"), [("a: [", "is not YAML"), ("- 1", "expected a mapping"), ("", "expected a")])
def test_a_file_that_is_none_says_so(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_config(path)
    with pytest.raises(ValueError, match="gone.yaml does not exist"):
        load_config(tmp_path / "gone.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_the_repository_can_be_loaded(path: Path) -> None:
    assert load_config(path).name == path.stem


def test_rates_are_more_levels_for_some_systems_in_the_first_repetition(tmp_path: Path) -> None:
    config = load(
        tmp_path, rates=[0, 2], repetitions=2, once=["fixed"], extra_rates={"rates": [2, 8], "systems": ["lru"]}
    )
    assert config.rates_of("lru", "lru", 0) == (0.0, 2.0, 8.0)
    assert config.rates_of("lru", "lru", 1) == config.rates_of("full-cache", "full-cache", 0) == (0.0, 2.0)
    assert config.rates_of("fixed", "knorm@0.5+lru", 1) == config.rates_of("lru", "lru", 2) == ()
    with pytest.raises(ValueError, match="extra_rates: rates is .0.: expected a list of requests/s above 0"):
        load(tmp_path, extra_rates={"rates": [0], "systems": ["lru"]})
    with pytest.raises(ValueError, match="extra_rates has no systems: expected a list of systems"):
        load(tmp_path, extra_rates={"rates": [1]})
    with pytest.raises(ValueError, match="extra_rates: seconds is 0: expected seconds above 0"):
        load(tmp_path, extra_rates=[{"rates": [1], "systems": ["lru"], "seconds": 0}])
    with pytest.raises(ValueError, match="extra_rates"):
        load(tmp_path, extra_rates=[4])


def test_rates_may_be_several_groups(tmp_path: Path) -> None:
    groups = [{"rates": [8, 2], "systems": ["lru"]}, {"rates": [8, 4], "systems": ["lru", "full-cache"]}]
    config = load(tmp_path, rates=[0], extra_rates=groups)
    assert config.rates_of("lru", "lru", 0) == (0.0, 2.0, 4.0, 8.0)
    assert config.rates_of("full-cache", "full-cache", 0) == (0.0, 4.0, 8.0)
    assert config.rates_of("fixed", "knorm@0.5+lru", 0) == (0.0,)


def test_a_load_has_levels_once_saturation_is_known(tmp_path: Path) -> None:
    given = {"of_saturation": [2, 0.5], "reference": "tiers-lru", "seconds": 60}
    config = load(tmp_path, rates=[0], load=given)
    assert (config.load.cut_s, config.load.clients, config.load.multiples) == (10.0, 16, {})
    assert config.rates == (0.0,)
    saturated = config.saturated_at(12.345)
    assert saturated.rates == (0.0, 6.17, 24.7)
    assert saturated.rates_of("lru", "lru", 0) == saturated.rates
    assert json.loads(json.dumps(saturated.record())) == saturated.record()
    assert saturated.identity() != config.identity()
    assert load(tmp_path, rates=[0], load=given, ttft_limit_s=0.5).identity() == config.identity()
    with pytest.raises(ValueError, match="has no load: expected one"):
        load(tmp_path).saturated_at(1.0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"load": {"of_saturation": [0], "reference": "x", "seconds": 1}}, r"load: of_saturation is \[0\]: expected"),
        ({"load": {"of_saturation": [1], "seconds": 1}}, "load has no reference: expected the name of a system"),
        ({"load": {"of_saturation": [1], "reference": "x"}}, "load has no seconds: expected seconds above 0"),
        ({"load": {"of_saturation": [1], "reference": "x", "seconds": 1, "cut": 1}}, "load has the unknown key 'cut'"),
        (
            {"load": {"of_saturation": [1], "reference": "x", "seconds": 1, "clients": 0}},
            "load: clients is 0: expected",
        ),
        ({"arrivals": "gamma 0"}, "arrivals is 'gamma 0': expected poisson, gamma SHAPE"),
        ({"ttft_limit_s": 0}, "ttft_limit_s is 0: expected seconds above 0"),
    ],
)
def test_an_error_in_a_load_names_what_is_accepted(tmp_path: Path, values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(tmp_path, **values)
