"""Rates at multiples of saturation, of servers that answer in an instant or after a while."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tests.unit.benchmark.test_runs import CONTEXTS, SIZES, Bench, make

from sglang_evicpress.benchmark import runs, server
from sglang_evicpress.benchmark.client import Outcome
from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.runs import Done
from sglang_evicpress.benchmark.saturation import at_saturation, within
from sglang_evicpress.benchmark.server import ServerError
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.systems import sizes_of

LOAD = {"of_saturation": [0.5, 2], "reference": "tiers-lru", "seconds": 0.6, "cut_s": 0.3, "clients": 2}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 1.0)
    monkeypatch.setattr(runs, "ABORT_S", 0.05)


def saturated(bench: Bench, *, is_fresh: bool = False) -> Config:
    return at_saturation(
        *(bench.config, bench.systems, CONTEXTS, sizes_of(bench.config, **SIZES), bench.out),
        is_fresh=is_fresh,
        launch=bench.launch,
    )


def test_saturation_is_measured_once_and_every_system_gets_its_multiples(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1, load=LOAD)
    bench.words = {"tiers-lru": ("delay=0.02",)}
    config = saturated(bench)
    told = orjson.loads((bench.out / "saturation.json").read_bytes())
    assert (told["system"], told["clients"], told["seconds"]) == ("tiers-lru", 2, 0.6)
    assert 0 < told["rps"] == pytest.approx(told["num_answers"] / 0.45)
    assert told["rps"] < 2 / 0.02
    assert config.rates == (0.0, float(f"{0.5 * told['rps']:.3g}"), float(f"{2 * told['rps']:.3g}"))
    assert bench.lines("start") == ["delay=0.02 tiers-lru"]
    assert saturated(bench) == config
    assert bench.lines("start") == ["delay=0.02 tiers-lru"]
    saturated(bench, is_fresh=True)
    assert len(bench.lines("start")) == 2


def test_runs_at_its_multiples_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], repetitions=1, load=LOAD)
    bench.words = {"tiers-lru": ("delay=0.02",)}
    bench.config = saturated(bench)
    assert bench.run() == Done(num_runs=6, num_before=0, num_failed=0)
    results = read_results(bench.out)
    assert set(results.multiples.values()) == {0.5, 2.0} and set(results.multiples) == set(results.rates) - {0.0}
    header = results.runs_of("full-cache", results.rates[1])[0].header
    assert header["seconds"] == 0.6
    bench.config = saturated(make(tmp_path, rates=[0], repetitions=1, load=LOAD))
    assert bench.run() == Done(num_runs=0, num_before=6, num_failed=0)


def test_the_saturation_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    saturated(make(tmp_path, load={**LOAD, "seconds": 3}))  # a slow machine may answer nothing in less
    with pytest.raises(ValueError, match="saturation.json is that of another benchmark: expected another --out"):
        saturated(make(tmp_path, load=LOAD, seed=7))
    with pytest.raises(ValueError, match="reference is 'gone': expected one of full-cache, tiers-lru"):
        saturated(make(tmp_path, load={**LOAD, "reference": "gone"}))
    without = make(tmp_path)
    assert saturated(without) is without.config


def test_a_server_that_fails_has_no_saturation(tmp_path: Path) -> None:
    bench = make(tmp_path, load=LOAD)
    bench.words = {"tiers-lru": ("fail=0.1",)}
    with pytest.raises(ServerError, match="saturation of tiers-lru: .* requests? failed"):
        saturated(bench)
    bench.words = {"tiers-lru": ("delay=0.4",)}
    bench.config = make(tmp_path, warm_up=0, load={**LOAD, "seconds": 0.3}).config
    with pytest.raises(ValueError, match="tiers-lru answered none of 2 clients in 0.3 s"):
        saturated(bench)
    assert not (bench.out / "saturation.json").exists()


def test_what_has_no_answer_when_a_level_ends_is_cut_and_the_server_is_empty_before_the_next(tmp_path: Path) -> None:
    bench = make(tmp_path, rates=[0], requests=1, repetitions=1, systems=["tiers-lru"], load=LOAD)
    bench.config = bench.config.saturated_at(20.0)
    bench.words = {"tiers-lru": ("delay=0.5",)}
    assert bench.run() == Done(num_runs=3, num_before=0, num_failed=0)
    results = read_results(bench.out)
    (run,) = results.runs_of("tiers-lru", 10.0)
    assert len(run.requests) == 6
    lines = list(map(orjson.loads, (bench.out / "runs/tiers-lru/0-10.jsonl").read_bytes().splitlines()))[1:]
    for line in lines:
        assert (line["is_cut"] or line["arrival_s"] < 0.4) and line["error"] is None
    num_cut = sum(line["is_cut"] for line in lines)
    assert num_cut > 0
    cell = summarise(results).cell("tiers-lru", 10.0)
    assert (cell.num_requests, cell.num_cut, cell.num_failed, cell.num_refused) == (6, num_cut, 0, 0)
    assert cell.ttft_p95_of_all_s == float("inf")
    # One more was asked for behind each rate that was cut, and seen to be answered; a slow machine cuts some unsent.
    num_answered = 6 + 24 - num_cut - summarise(results).cell("tiers-lru", 40.0).num_cut
    assert 4 + 1 + num_answered + 2 <= len(bench.lines("ask")) <= 4 + 1 + (6 + 1) + (24 + 1)


def test_refused_requests_are_counted_apart_and_do_not_end_a_benchmark(tmp_path: Path) -> None:
    load = {**LOAD, "cut_s": 30}
    bench = make(tmp_path, rates=[0], requests=1, warm_up=0, repetitions=1, systems=["tiers-lru"], load=load)
    bench.config = bench.config.saturated_at(20.0)
    bench.words = {"tiers-lru": ("refuse=0.5",)}
    assert bench.run() == Done(num_runs=3, num_before=0, num_failed=0)
    cell = summarise(read_results(bench.out)).cell("tiers-lru", 40.0)
    assert (cell.num_requests, cell.num_refused, cell.num_failed, cell.num_cut) == (24, 12, 0, 0)


def test_answers_count_where_they_end() -> None:
    ends = [Outcome(0.0, 0.0, end_s=end_s) for end_s in (0.1, 0.25, 0.3, 1.0, 1.01)]
    others = [Outcome(0.0, 0.0, end_s=0.5, is_cut=True), Outcome(0.0, 0.0, end_s=0.5, error="broke")]
    assert within([*ends, *others], 0.25, 1.0) == 2
