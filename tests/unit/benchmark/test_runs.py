"""Whole benchmarks of servers that answer in an instant."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
import yaml

from sglang_evicpress.benchmark import profiling, server
from sglang_evicpress.benchmark.config import Config, load_config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.runs import Done, launch_command, run_all
from sglang_evicpress.benchmark.server import ServerError
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.systems import System, expand, sizes_of
from sglang_evicpress.profiler.contexts import GivenQuestion as Question
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file

FAKE = Path(__file__).with_name("fake_sglang.py")
CONTEXTS = [
    Context(
        f"context {i}",
        (Question("training?", None), Question("q1?", f"a{i}"), Question("q2?", None)),
        "f",
        1000,
    )
    for i in range(4)
]
SIZES = {"working_set_tokens": 4000, "kv_bytes_per_token": 100_000}


@dataclasses.dataclass
class Bench:
    """A benchmark in a folder. ``words`` go to the fake servers of systems by kind."""

    config: Config
    out: Path
    words: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def systems(self) -> list[System]:
        return expand(self.config, sizes_of(self.config, **SIZES), self.out)

    @property
    def log(self) -> Path:
        return self.out.parent / "fake.log"

    def lines(self, word: str) -> list[str]:
        if not self.log.exists():
            return []
        return [line.partition(" ")[2] for line in self.log.read_text().splitlines() if line.startswith(word)]

    def launch(self, config: Config, system: System, port: int) -> Sequence[str]:
        assert "--max-total-tokens" in launch_command(config, system, port)
        stock = ("stock",) if system.is_stock else ()
        more = self.words.get(system.kind, ())
        return [sys.executable, str(FAKE), str(port), str(self.log), *stock, *more, system.slug]

    def run(self, *names: str, is_fresh: bool = False) -> Done:
        sizes = sizes_of(self.config, **SIZES)
        chosen = [system for system in self.systems if not names or system.name in names]
        return run_all(
            *(self.config, self.systems, chosen, CONTEXTS, sizes, self.out),
            command="evicpress bench serve ...",
            is_fresh=is_fresh,
            launch=self.launch,
        )

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.out / "runs")) for path in (self.out / "runs").glob("*/*.jsonl*"))


def make(folder: Path, **values: object) -> Bench:
    (folder / "m").mkdir(exist_ok=True)
    given = {
        "model": "m",
        "contexts": {"command": "true"},
        "requests": 5,
        "memory": {"gpu": 0.5, "host": 0.5, "ssd": 1},
        "rates": [0, 200],
        "repetitions": 2,
        "systems": ["full-cache", "tiers-lru"],
        **values,
    }
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(given))
    return Bench(load_config(path), folder / "out")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 1.0)


# ---- order and files


def test_every_run_is_made_once_with_systems_in_turn(tmp_path: Path) -> None:
    bench = make(tmp_path)
    assert bench.run() == Done(num_runs=8, num_before=0, num_failed=0)
    assert bench.lines("start") == ["stock full-cache", "tiers-lru", "tiers-lru", "stock full-cache"]
    results = read_results(bench.out)
    assert [(run.system, run.repetition, run.rate) for run in results.runs] == [
        (system, repetition, rate)
        for system in ("full-cache", "tiers-lru")
        for repetition in (0, 1)
        for rate in (0, 200)
    ]
    assert all(request.is_complete for run in results.runs for request in run.requests.values())
    assert all(list(run.requests) == [0, 1, 2, 3, 4] for run in results.runs)


def test_every_system_is_asked_the_same_in_one_repetition(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1)
    bench.run()
    asked = bench.lines("ask")
    half = len(asked) // 2
    assert half == 4 + 5
    assert asked[:half] == asked[half:]


def test_each_context_is_asked_about_once_before_the_first_level(tmp_path: Path) -> None:
    bench = make(tmp_path, repetitions=1, systems=["full-cache"])
    bench.run()
    assert sorted(bench.lines("ask")[:4]) == [f"context {i} training?" for i in range(4)]
    assert len(bench.lines("ask")) == 4 + 2 * 5


def test_a_run_says_what_was_seen(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[200], repetitions=1)
    bench.run()
    of = {run.system: run for run in read_results(bench.out).runs}
    header = of["tiers-lru"].header
    assert header["stats"]["asked"] == header["stats_before"]["asked"] + 5
    assert header["tiers"] == header["tiers_before"] == {"tiers": {"gpu": {"used_bytes": 150}}}
    assert header["resident"] == {
        "gpu": {"exact": {"nodes": 2, "tokens": 15, "slots": 15}},
        "ssd": {"knorm@0.5": {"nodes": 1, "tokens": 8, "slots": 4}},
    }
    assert header["check"] == {"ok": True, "violations": []}
    assert (header["is_stock_checked"], header["tree_core"]) == (False, "evicpress")
    assert header["start_s"] > 0 and header["took_s"] > 0 and len(header["load_average"]) == 3
    first = read_results(bench.out).plan["environment"]
    assert {name: header[name] for name in ("versions", "commit", "machine", "num_cpus")}.items() <= first.items()
    nodes = orjson.loads((bench.out / "runs/tiers-lru/0-200.tree.json").read_bytes())
    assert [(node["tier"], node["num_tokens"]) for node in nodes] == [("gpu", 10), ("gpu", 5), ("ssd", 8)]
    assert bench.lines("tree") == ["0", "2"]  # in pages, after the rate
    assert not (bench.out / "runs/full-cache/0-200.tree.json").exists()
    header = of["full-cache"].header
    assert (header["is_stock_checked"], header["tree_core"]) == (True, "python")
    assert read_results(bench.out).tree_cores["full-cache"] == "python"
    assert [header[name] for name in ("stats", "stats_before", "tiers", "resident", "check")] == [None] * 5
    _, *lines = map(orjson.loads, (bench.out / "runs/full-cache/0-200.jsonl").read_bytes().splitlines())
    assert lines[0]["answer"] == f"to context {lines[0]['context']}\n\n{lines[0]['question']}"
    assert (lines[0]["prompt_tokens"], lines[0]["cached_tokens"]) == (9, 4)
    assert {line["reference"] for line in lines} <= {None, "a0", "a1", "a2", "a3"}
    assert [line["arrival_s"] for line in lines] == sorted(line["arrival_s"] for line in lines)


def test_the_plan_says_how_it_was_measured(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1, systems=["full-cache", "hicache"], server="--device cpu")
    bench.run()
    plan = read_results(bench.out).plan
    assert plan["settings"]["num_contexts"] == 4
    assert plan["settings"]["working_set_tokens"] == 4000
    assert plan["settings"]["arrivals"] == "poisson"
    assert plan["environment"]["command"] == "evicpress bench serve ..."
    assert plan["environment"]["num_cpus"] >= 1
    assert set(plan["environment"]["versions"]) == {"sglang", "torch", "sglang-evicpress", "python"}
    assert [system["name"] for system in plan["systems"]] == ["full-cache"]
    assert [each["name"] for each in plan["left_out"]] == ["hicache"]


def test_a_system_that_runs_once_is_not_repeated(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], once=["full-cache"])
    assert bench.run().num_runs == 3
    assert bench.lines("start") == ["stock full-cache", "tiers-lru", "tiers-lru"]


# ---- going on


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    bench = make(tmp_path)
    bench.run()
    before = {name: (bench.out / "runs" / name).read_bytes() for name in bench.files()}
    (bench.out / "runs/tiers-lru/0-200.jsonl").unlink()
    bench.log.unlink()
    assert bench.run() == Done(num_runs=1, num_before=7, num_failed=0)
    assert bench.lines("start") == ["tiers-lru"]
    assert len(bench.lines("ask")) == 4 + 5  # the warm-up and one rate
    after = {name: (bench.out / "runs" / name).read_bytes() for name in bench.files()}
    assert [name for name in before if before[name] != after[name]] == ["tiers-lru/0-200.jsonl"]
    results = read_results(bench.out)
    assert len(results.plan["resumed"]) == 1
    starts = {(run.system, run.repetition, run.rate): run.header["start_id"] for run in results.runs}
    assert len(set(starts.values())) == 5
    assert starts["tiers-lru", 1, 0.0] == starts["tiers-lru", 1, 200.0] != starts["tiers-lru", 0, 0.0]
    note = "tiers-lru, repetition 1: its rates ran on 2 starts of the server, each warmed up anew"
    assert [each for each in summarise(results).notes if "starts" in each] == [note]


def test_nothing_is_started_when_nothing_is_missing(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0])
    bench.run("full-cache")
    bench.log.unlink()
    assert bench.run("full-cache") == Done(num_runs=0, num_before=2, num_failed=0)
    assert bench.lines("start") == []
    assert bench.run().num_runs == 2  # those of the other system
    assert bench.lines("start") == ["tiers-lru", "tiers-lru"]


def test_runs_of_another_benchmark_are_refused_and_moved_away_when_asked(tmp_path: Path) -> None:
    make(tmp_path, rates=[0], repetitions=1).run()
    (tmp_path / "out/scores.jsonl").write_text("")
    bench = make(tmp_path, rates=[0], repetitions=1, seed=3)
    with pytest.raises(ValueError, match=r"out has runs of another benchmark, which differs in seed: expected another"):
        bench.run()
    assert bench.run(is_fresh=True).num_runs == 2
    assert sorted(path.name for path in (bench.out / "runs.old-1").iterdir()) == [
        *("full-cache", "plan.json", "scores.jsonl", "tiers-lru")
    ]
    assert bench.run(is_fresh=True).num_runs == 2
    assert (bench.out / "runs.old-2/full-cache/0-0.jsonl").exists()
    assert len(bench.files()) == 2


def test_more_repetitions_go_on_from_fewer(tmp_path: Path) -> None:
    make(tmp_path, rates=[0], repetitions=1).run()
    assert make(tmp_path, rates=[0], repetitions=3).run() == Done(num_runs=4, num_before=2, num_failed=0)


def test_another_number_of_requests_at_a_rate_that_has_runs_is_refused(tmp_path: Path) -> None:
    extra = {"rates": [300], "systems": ["full-cache"], "requests": 6}
    make(tmp_path, rates=[0], repetitions=1, extra_rates=extra).run()
    plan = (tmp_path / "out/plan.json").read_bytes()
    for changed, count in (({"requests": 7}, 7), ({"seconds": 0.1}, 30)):
        bench = make(tmp_path, rates=[0], repetitions=1, extra_rates={**extra, **changed})
        with pytest.raises(
            ValueError, match=f"0-300.jsonl has 6 requests, and the config now asks for {count} at that"
        ):
            bench.run()
    assert (tmp_path / "out/plan.json").read_bytes() == plan
    more = [{**extra, "systems": ["full-cache", "tiers-lru"]}, {"rates": [400], "systems": ["lru"], "requests": 9}]
    bench = make(tmp_path, rates=[0], repetitions=1, systems=["full-cache", "tiers-lru", "lru"], extra_rates=more)
    assert bench.run() == Done(num_runs=3, num_before=3, num_failed=0)
    bench = make(tmp_path, rates=[0], repetitions=1, extra_rates={**extra, "requests": 7})
    assert bench.run(is_fresh=True).num_runs == 3


def test_other_contexts_are_another_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1)
    bench.run()
    other = [dataclasses.replace(CONTEXTS[0], text="another"), *CONTEXTS[1:]]
    monkeypatch.setitem(globals(), "CONTEXTS", other)
    with pytest.raises(ValueError, match="differs in contexts_sha256"):
        bench.run()


def test_another_trace_at_the_same_path_is_another_benchmark(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1\n2\n4\n")
    make(tmp_path, repetitions=1, arrivals="trace t.csv").run()
    (tmp_path / "t.csv").write_text("1\n2\n3\n")
    with pytest.raises(ValueError, match="which differs in files_sha256: expected another --out"):
        make(tmp_path, repetitions=1, arrivals="trace t.csv").run()


def test_a_folder_is_used_by_one_benchmark_at_a_time(tmp_path: Path) -> None:
    import fcntl

    bench = make(tmp_path)
    bench.out.mkdir()
    with (bench.out / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is in use by another benchmark"):
            bench.run()
    assert bench.lines("start") == []


# ---- what goes wrong


def test_a_system_that_is_not_stock_is_refused(tmp_path: Path) -> None:
    bench = make(tmp_path)
    bench.launch = lambda config, system, port: [  # type: ignore[method-assign]
        *(sys.executable, str(FAKE), str(port), str(bench.log), system.slug)
    ]
    with pytest.raises(
        ServerError, match="full-cache is to be stock SGLang, but GET /evicpress/stats answered 200, not 404"
    ):
        bench.run()
    assert bench.files() == []
    assert bench.lines("ask") == []


def test_a_cache_that_is_not_in_order_ends_the_benchmark(tmp_path: Path) -> None:
    bench = make(tmp_path)
    bench.words = {"tiers-lru": ("violate",)}
    with pytest.raises(ServerError, match="the cache is not in order: node 7 holds 2 slots; see .*0-0.jsonl.failed"):
        bench.run()
    assert bench.files() == ["full-cache/0-0.jsonl", "full-cache/0-200.jsonl", "tiers-lru/0-0.jsonl.failed"]
    bench.words = {}
    assert bench.run() == Done(num_runs=6, num_before=2, num_failed=0)
    assert not [name for name in bench.files() if name.endswith(".failed")]


def test_a_run_counts_with_one_failure_in_a_hundred(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1, requests=100, systems=["full-cache"])
    bench.words = {"full-cache": ("fail=0.01",)}
    assert bench.run() == Done(num_runs=1, num_before=0, num_failed=1)
    (run,) = read_results(bench.out).runs
    errors = [request.error for request in run.requests.values() if not request.is_complete]
    assert errors == ["status 500: made to fail"]


def test_more_failures_end_the_benchmark(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1, requests=10)
    bench.words = {"full-cache": ("fail=0.1",)}
    with pytest.raises(ServerError, match="1 of 10 requests failed, such as by: status 500: made to fail; see"):
        bench.run()
    assert bench.files() == ["full-cache/0-0.jsonl.failed"]


@pytest.mark.parametrize("number", [2, 7])
def test_a_server_that_dies_ends_the_benchmark_at_once(tmp_path: Path, number: int) -> None:
    bench = make(tmp_path, rates=[20], requests=10_000)
    bench.words = {"full-cache": (f"die={number}",)}
    match = r"full-cache, repetition 1 of 2.*(warm-up failed|the server ended).*out/logs/full-cache"
    with pytest.raises(ServerError, match=match):
        bench.run()
    assert bench.files() == []


def test_no_ssd_folder_is_left(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1)
    left = bench.out / "ssd/tiers-lru/left-from-before"
    left.parent.mkdir(parents=True)
    left.write_text("")
    seen = []

    def launch(config: Config, system: System, port: int) -> Sequence[str]:
        if system.ssd_dir is not None:
            seen.append(sorted(system.ssd_dir.iterdir()))
            (system.ssd_dir / "payload").write_text("")
        return Bench.launch(bench, config, system, port)

    bench.launch = launch  # type: ignore[method-assign]
    bench.run()
    assert seen == [[]]
    assert not (bench.out / "ssd").exists()


def test_servers_do_not_inherit_what_would_change_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EVICPRESS", "attention")
    bench = make(tmp_path, rates=[0], repetitions=1, env={"SAID": "hello"})
    show = "import os, sys; open(sys.argv[2], 'a').write(f'env {[*map(os.environ.get, sys.argv[3:])]}')"
    bench.launch = lambda config, system, port: [  # type: ignore[method-assign]
        *(sys.executable, "-c", show, str(port), str(bench.log)),
        *("SGLANG_EVICPRESS", "SAID", "SGLANG_PLUGINS"),
    ]
    with pytest.raises(ServerError):
        bench.run("full-cache")
    (line,) = bench.lines("env")
    inherited, said, listed = ast.literal_eval(line)
    assert (inherited, said) == (None, "hello")
    assert listed and "evicpress" not in listed.split(",")


# ---- profiles

PROFILER = """
import sys
from pathlib import Path
words = dict(zip(sys.argv[2:], sys.argv[3:]))
out = Path(words["--contexts"]).parent
with (out.parent / "fake.log").open("a") as file:
    file.write(f"profile {words['--forms']} {len(Path(words['--contexts']).read_text().splitlines())}\\n")
with (out / "profiles.log").open("a") as file:
    file.write("measured\\n")
sys.exit(STATUS)
"""


def test_profiles_are_measured_once_before_the_runs_that_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(
        tmp_path, rates=[0], systems=["full-cache", "evicpress"], profiles={"questions": 1, "forms": "knorm@0.5"}
    )
    monkeypatch.setattr(profiling, "_CLI", PROFILER.replace("STATUS", "0"))
    bench.run("full-cache")
    assert bench.lines("profile") == []
    bench.run()
    assert bench.lines("profile") == ["knorm@0.5 4"]
    first = ["stock full-cache", "stock full-cache", "profiling"]
    assert bench.lines("start") == [*first, "evicpress-a=1", "evicpress-a=1"]
    bench.run(is_fresh=True)
    assert bench.lines("profile") == ["knorm@0.5 4"]
    other = make(
        tmp_path, rates=[0], systems=["evicpress"], profiles={"questions": 1, "forms": "knorm@0.2"}, repetitions=1
    )
    other.run(is_fresh=True)
    assert other.lines("profile") == ["knorm@0.5 4", "knorm@0.2 4"]
    assert (bench.out / "profiles.log").read_text() == "measured\n"  # the older ones are gone


def test_profiles_by_another_budget_file_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_CLI", PROFILER.replace("STATUS", "0"))
    given = {"rates": [0], "repetitions": 1, "systems": ["evicpress"]}
    for number, shares in enumerate(((0.5, 1.5), (1.5, 0.5)), start=1):
        write_budget_file(str(tmp_path / "b.json"), BudgetFile(shares, 10, {}))
        bench = make(tmp_path, **given, profiles={"questions": 1, "forms": "knorm@0.5:b.json"})
        for _ in range(2):
            bench.run(is_fresh=True)
            assert len(bench.lines("profile")) == number


def test_interrupted_profiling_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(tmp_path, rates=[0], systems=["evicpress"], profiles={"questions": 1, "forms": "knorm@0.5"})
    monkeypatch.setattr(profiling, "_CLI", PROFILER.replace("STATUS", "1"))
    with pytest.raises(ServerError, match="profiling the contexts ended with status 1; its output is in .*profile.log"):
        bench.run()
    assert bench.lines("start") == ["profiling"]
    monkeypatch.setattr(profiling, "_CLI", PROFILER.replace("STATUS", "0"))
    bench.run()
    assert (bench.out / "profiles.log").read_text() == "measured\nmeasured\n"  # the server would have kept the first


# ---- Ctrl-C

PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
import test_runs
bench = test_runs.make(Path(sys.argv[2]))
bench.words = {"tiers-lru": ("delay=0.3",)}
try:
    bench.run()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_whole_files_and_no_server_and_goes_on(
    tmp_path: Path, sign: signal.Signals
) -> None:
    words = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        bench = make(tmp_path)
        while len(bench.lines("ask")) < (4 + 5 + 5) + 4 + 3:  # in the first rate of the second system
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(sign)
        assert process.wait(30) == 130
    alive = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != os.getpid() and str(bench.log) in _command_of(entry)
    ]
    assert alive == []
    assert bench.files() == ["full-cache/0-0.jsonl", "full-cache/0-200.jsonl"]
    assert not (bench.out / "ssd").exists()
    assert bench.run() == Done(num_runs=6, num_before=2, num_failed=0)
    assert len(read_results(bench.out).runs) == 8


def _command_of(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
