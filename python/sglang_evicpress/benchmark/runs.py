"""Runs every system as a real server in turn, A B C then C B A, and writes each run down as soon as it is complete."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from sglang_evicpress.benchmark.client import TIMEOUT_S, Outcome, drive, keep_asking
from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.benchmark.environment import environment, provenance
from sglang_evicpress.benchmark.interrupts import raising_interrupts
from sglang_evicpress.benchmark.profiling import Profiles
from sglang_evicpress.benchmark.run_dir import RunDir
from sglang_evicpress.benchmark.server import Server, free_port
from sglang_evicpress.benchmark.systems import Sizes, System, left_out, profiling_system
from sglang_evicpress.benchmark.workload import Planned, is_loaded, num_requests, plan, warm_up
from sglang_evicpress.progress import Progress

MOST_FAILED = 0.01
"""A run of which a larger share of the requests fails does not count, and ends the benchmark."""

ABORT_S = 3.0
"""SGLang aborts a request two seconds after its client has left."""

MODEL = "default"
"""What requests call the model: a server has one, and takes any name."""

_NUM_QUESTIONS = 2000
"""That clients are asked in turn who ask without a pause."""

Launch = Callable[[Config, System, int], Sequence[str]]


def launch_command(config: Config, system: System, port: int) -> Sequence[str]:
    """The command that starts a server of a system. ``-P``: no file of the folder it starts in is ever imported."""
    return [
        *(sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", config.model),
        *("--host", "127.0.0.1", "--port", str(port), *config.server, *system.flags),
    ]


@dataclass(frozen=True, slots=True)
class Done:
    """Counts of runs made, of runs there before, and of failed requests of the former."""

    num_runs: int
    num_before: int
    num_failed: int


def run_all(
    config: Config,
    systems: Sequence[System],
    chosen: Sequence[System],
    contexts: Sequence[Context],
    sizes: Sizes,
    out: Path,
    *,
    command: str,
    is_fresh: bool = False,
    timeout_s: float = TIMEOUT_S,
    launch: Launch = launch_command,
) -> Done:
    """Make the runs of ``chosen``, which are some of ``systems``, that are not in ``out`` yet.

    All rates of one repetition of a system that are missing run on one start of its server, which each run names: those
    of a repetition that was stopped go on on another one. ``is_fresh`` moves older runs away.
    ``timeout_s`` is for one request. Raises ValueError when ``out`` has runs of another benchmark or is in use,
    ServerError when a server fails, a cache is not in order or too many requests fail, and KeyboardInterrupt, also for
    SIGTERM and SIGHUP; no server is left then, and what was complete is kept.
    """
    run_dir = RunDir(out.resolve())
    with raising_interrupts(), run_dir.locked():
        counts = {
            run_dir.run_file(system, repetition, rate): num_requests(config, rate)
            for system, repetition in product(systems, range(config.repetitions))
            for rate in rates_of(config, system, repetition)
        }
        run_dir.open_plan(plan_of(config, systems, contexts, sizes, command), counts, is_fresh=is_fresh)
        bench = Bench(config, contexts, run_dir, timeout_s, launch)
        wanted = [
            (system, repetition)
            for repetition in range(config.repetitions)
            for system in (reversed(chosen) if repetition % 2 else chosen)  # a machine that slows down slows all alike
        ]
        missing = {pair: rates for pair in wanted if (rates := bench.missing(*pair))}
        num_missing = sum(map(len, missing.values()))
        num_requests_missing = sum(num_requests(config, rate) for rates in missing.values() for rate in rates)
        with Progress(num_requests_missing, "requests", is_shown=sys.stderr.isatty()) as progress:
            if any(system.profiles for system, _ in missing):
                bench.profile(profiling_system(config, sizes, out), progress)
            for (system, repetition), rates in missing.items():
                bench.run(system, repetition, rates, progress)
        num_wanted = sum(len(rates_of(config, *pair)) for pair in wanted)
        return Done(num_missing, num_wanted - num_missing, bench.num_failed)


class Bench:
    """Runs systems on one folder, which is locked."""

    def __init__(
        self, config: Config, contexts: Sequence[Context], run_dir: RunDir, timeout_s: float, launch: Launch
    ) -> None:
        self.num_failed = 0
        self._config = config
        self._contexts = contexts
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._launch = launch
        self._provenance = provenance()

    def missing(self, system: System, repetition: int) -> list[float]:
        """The rates that were not run yet."""
        rates, run_dir = rates_of(self._config, system, repetition), self._run_dir
        return [rate for rate in rates if not run_dir.run_file(system, repetition, rate).exists()]

    def profile(self, system: System, progress: Progress) -> None:
        """Measure the profiles, unless that is done."""
        profiles = Profiles(self._config, self._contexts, self._run_dir)
        if not profiles.open():
            return
        progress.say(f"profiling {len(self._contexts)} contexts first")
        with self._server(system, None) as server:
            profiles.measure(server)
        profiles.close()

    def run(self, system: System, repetition: int, rates: Sequence[float], progress: Progress) -> None:
        """Run the rates on one start of the server."""
        where = f"{system.name}, repetition {repetition + 1} of {self._config.repetitions}"
        progress.say(f"{where}: starts")
        with self._run_dir.empty_ssd(system), self._server(system, repetition) as server:
            _check_routes(server, system)
            self._warm_up(server, where, progress)
            for rate in rates:
                shown = f"{where}, {'one client' if rate == 0 else f'{rate:g}/s'}"
                progress.name(shown)
                self._rate(server, system, repetition, rate, shown, progress)

    def saturate(self, system: System, clients: int, seconds: float, progress: Progress) -> list[Outcome]:
        """Outcomes of so many clients that ask without a pause for so long."""
        where = f"saturation of {system.name}"
        progress.name(f"{where}: starts")
        with self._run_dir.empty_ssd(system), self._server(system, None) as server:
            _check_routes(server, system)
            self._warm_up(server, where, progress)
            progress.name(f"{where}: {clients} clients for {seconds:g} s")
            outcomes = asyncio.run(
                keep_asking(
                    *(server.url, MODEL, plan(self._config, self._contexts, 0, 0.0, count=_NUM_QUESTIONS)),
                    max_new_tokens=self._config.workload.max_new_tokens,
                    num_clients=clients,
                    seconds=seconds,
                    timeout_s=self._timeout_s,
                )
            )
            failed = [outcome for outcome in outcomes if outcome.error is not None and not outcome.is_refused]
            if len(failed) > MOST_FAILED * len(outcomes):
                raise server.error(f"{where}: {len(failed)} of {len(outcomes)} requests failed: {failed[0].error}")
            return outcomes

    def _server(self, system: System, repetition: int | None) -> Server:
        port = free_port()
        return Server(
            self._launch(self._config, system, port),
            port=port,
            log=self._run_dir.log_file(system.slug, repetition),
            env=_environment(self._config, system),
            folder=self._config.path.resolve().parent,
        )

    def _warm_up(self, server: Server, where: str, progress: Progress) -> None:
        items = warm_up(self._config, self._contexts)
        progress.name(f"{where}: warms up")
        planned = [Planned(index, 0.0, item, 0, 0.0) for index, item in enumerate(items)]

        def check(outcome: Outcome) -> None:
            if outcome.error is not None:
                raise server.error(f"{where}: a request of the warm-up failed: {outcome.error}")

        self._drive(server, planned, is_closed=True, on_outcome=check)

    def _rate(
        self, server: Server, system: System, repetition: int, rate: float, where: str, progress: Progress
    ) -> None:
        planned = plan(self._config, self._contexts, repetition, rate)
        before = _counters(server, system)
        load_average, begin_unix_s, begin = os.getloadavg(), time.time(), time.perf_counter()

        def note(outcome: Outcome) -> None:
            progress.step()
            if outcome.error is not None and not server.is_alive():
                raise server.error(f"{where}: the server ended")

        load = self._config.load if is_loaded(self._config, rate) else None
        until_s = None if load is None else load.seconds + load.cut_s
        outcomes = self._drive(server, planned, is_closed=rate == 0, until_s=until_s, on_outcome=note)
        took_s = time.perf_counter() - begin
        if any(outcome.is_cut for outcome in outcomes):
            self._let_end(server, planned[0], where)
        tree, after = _tree(server, system), _counters(server, system)
        check = server.post("/evicpress/check") if system.has_policy else None
        header = {
            "system": system.name,
            "repetition": repetition,
            "rate": rate,
            "begin_unix_s": begin_unix_s,
            "took_s": took_s,
            "offered_rps": rate,
            "seconds": None if load is None else load.seconds,
            "start_s": server.start_s,
            "start_id": server.start_id,
            "load_average": load_average,
            **self._provenance,
            "is_stock_checked": system.is_stock,
            "tree_core": "evicpress" if system.has_policy else server.tree_core,
            "stats": after.get("stats"),
            "stats_before": before.get("stats"),
            "tiers": after.get("tiers"),
            "tiers_before": before.get("tiers"),
            "resident": None if tree is None else _resident(tree),
            "check": check,
        }
        lines = [_line(entry, outcome) for entry, outcome in zip(planned, outcomes, strict=True)]
        path = self._run_dir.run_file(system, repetition, rate)
        failed = [outcome for outcome in outcomes if outcome.error is not None and not outcome.is_refused]
        violations = [] if check is None or check.get("ok") else check.get("violations") or [repr(check)]
        if violations or len(failed) > MOST_FAILED * len(outcomes):
            written = self._run_dir.write_run(path, header, lines, is_failed=True)
            what = f"{len(failed)} of {len(outcomes)} requests failed"
            if violations:
                what = f"the cache is not in order: {'; '.join(map(str, violations))}"
            elif failed:
                what += f", such as by: {failed[0].error}"
            raise server.error(f"{where}: {what}; see {written}")
        if tree is not None:
            self._run_dir.write_tree(path, tree)
        self._run_dir.write_run(path, header, lines, is_failed=False)
        self.num_failed += len(failed)
        times = [outcome.ttft_s for outcome in outcomes if outcome.error is None and outcome.ttft_s is not None]
        lost = {
            "failed": len(failed),
            "refused": sum(outcome.is_refused for outcome in outcomes),
            "cut": sum(outcome.is_cut for outcome in outcomes),
        }
        progress.say(
            f"{where}: {len(outcomes)} requests in {took_s:.1f} s, mean TTFT "
            f"{f'{statistics.fmean(times):.3f} s' if times else 'unknown'}"
            + "".join(f", {count} {name}" for name, count in lost.items() if count)
        )

    def _let_end(self, server: Server, entry: Planned, where: str) -> None:
        """Wait until nothing is left of requests that were cancelled: one that comes behind all of them is answered.

        Raises ServerError where it is not, within the time that a request may take.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            time.sleep(ABORT_S)
            (outcome,) = self._drive(server, [entry], is_closed=True, on_outcome=lambda _: None)
            if outcome.error is None:
                return
            if not outcome.is_refused or time.monotonic() > deadline:
                raise server.error(f"{where}: a request behind those that were cut failed: {outcome.error}")

    def _drive(
        self,
        server: Server,
        planned: Sequence[Planned],
        *,
        is_closed: bool,
        on_outcome: Callable[[Outcome], None],
        until_s: float | None = None,
    ) -> list[Outcome]:
        return asyncio.run(
            drive(
                server.url,
                MODEL,
                planned,
                max_new_tokens=self._config.workload.max_new_tokens,
                is_closed=is_closed,
                timeout_s=self._timeout_s,
                until_s=until_s,
                on_outcome=on_outcome,
            )
        )


def rates_of(config: Config, system: System, repetition: int) -> tuple[float, ...]:
    return config.rates_of(system.kind, system.name, repetition)


def _environment(config: Config, system: System) -> dict[str, str]:
    """Ours, without what would change a server of EvicPress unseen."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_EVICPRESS")}
    return {**inherited, **config.env, **system.env}


def _check_routes(server: Server, system: System) -> None:
    """Raises ServerError for a system without our cache that has routes of ours, and for one with it that has none."""
    status, _ = server.request("GET", "/evicpress/stats")
    if not system.has_policy and status != 404:
        raise server.error(f"{system.name} is to be stock SGLang, but GET /evicpress/stats answered {status}, not 404")
    if system.has_policy and status != 200:
        raise server.error(f"GET /evicpress/stats of {system.name} answered {status}: expected 200")


def _counters(server: Server, system: System) -> dict[str, Any]:
    """``stats`` and ``tiers`` of a system of ours."""
    if not system.has_policy:
        return {}
    return {"stats": server.get("/evicpress/stats"), "tiers": server.get("/evicpress/tiers")}


def _tree(server: Server, system: System) -> list[dict[str, Any]] | None:
    """Every node of the tree of a system of ours, read in pages."""
    if not system.has_policy:
        return None
    nodes: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None:
        page = server.get(f"/evicpress/tree?after={after}")
        nodes += page["nodes"]
        after = page.get("next")
    return nodes


def _resident(nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """By tier and form, the number of nodes, of their tokens and of the tokens kept."""
    resident: dict[str, dict[str, dict[str, int]]] = {}
    for node in nodes:
        forms = resident.setdefault(node["tier"], {})
        held = forms.setdefault(node["form"], {"nodes": 0, "tokens": 0, "slots": 0})
        held["nodes"] += 1
        held["tokens"] += node["num_tokens"]
        held["slots"] += node["num_slots"]
    return resident


def _line(entry: Planned, outcome: Outcome) -> dict[str, object]:
    item = entry.item
    return {
        "index": entry.index,
        "context": item.context,
        "family": item.family,
        "question": item.question,
        **asdict(outcome),
        "reference": item.reference,
    }


def plan_of(
    config: Config, systems: Sequence[System], contexts: Sequence[Context], sizes: Sizes, command: str
) -> Mapping[str, object]:
    """Content of ``plan.json``."""
    settings = {**asdict(sizes), "num_contexts": len(contexts), "arrivals": config.workload.arrivals}
    digest = sha256(repr(list(contexts)).encode("utf-8", "surrogatepass")).hexdigest()
    return {
        "config": config.record(),
        "settings": settings,
        "identity": {**config.identity(), **asdict(sizes), "contexts_sha256": digest},
        "environment": environment(command),
        "systems": [system.record() for system in systems],
        "left_out": [{"name": name, "why": why} for name, why in left_out(config).items()],
    }
