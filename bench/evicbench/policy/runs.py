"""Replays for the benchmarks of the policy: a run is a plain value, so that a pool of processes can share it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from evicbench.paths import ROOT
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.simulator import runs
from sglang_evicpress.simulator.replay import Machine
from sglang_evicpress.simulator.runs import Recompute, Settings, make_replay
from sglang_evicpress.traces import Trace, read_trace

T, R = TypeVar("T"), TypeVar("R")

TRACES = {
    "mooncake": ("conversation_first30min.jsonl.zst", "synthetic:chat"),
    "weka": ("sessions_split0.jsonl.zst", "synthetic:agent"),
    "miniswe": ("miniswe.jsonl.zst", "synthetic:agent:1"),
}
"""Short name -> (file as its publisher calls it, our own generator where the file is not found)."""

LIMITS = {"weka": 5000}
"""Requests of a trace that are replayed where not all are: a quarter of the sessions of WEKA's."""

FORMS = tuple(Form(press, kept) for press in ("keydiff", "snapkv", "knorm") for kept in (0.8, 0.6, 0.4, 0.2))
SLOT_BYTES = 131_072  # Llama-3.1-8B, bf16: 32 layers, 8 KV heads of 128, keys and values
COSTS = CostSnapshot(
    PrefillCost(0.01, 3.5e-5, 1.3e-9),
    {Tier.HOST: TransferCost(0.0005, 20e9), Tier.SSD: TransferCost(0.002, 2e9)},
    {},
)
"""EvicPress's machine: 20 and 2 GB/s (figure 2); an H100 (section 6.1) at half its peak on an 8B model, 16 GFLOP a
token and 0.5 MFLOP a pair of tokens. The default of ``evicpress replay`` as well."""

NOISE = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One policy over one trace; ``sizes`` in percent of the working set per tier, 0: no such tier."""

    trace: str
    policy: str
    sizes: tuple[float, ...] = (1.0, 4.0, 20.0)
    alpha: float = 1.0
    may_recompute: bool = True
    limit: int | None = None
    forms: tuple[Form, ...] = field(default=FORMS)


@dataclass(frozen=True, slots=True)
class Result:
    """Means over all requests, in seconds; hits and regret as shares."""

    run: Run
    num_requests: int
    ttft_s: float
    quality: float
    quality_of_hits: float
    hits: tuple[float, ...]
    regret: float
    predicted_regret: float
    typical_gap_s: float


def trace_file(name: str) -> str:
    """File of a trace: in a folder in EVICPRESS_TRACES, or any data folder beside the checkout."""
    file, synthetic = TRACES[name]
    folder = os.environ.get("EVICPRESS_TRACES")
    found = Path(folder).rglob(file) if folder else ROOT.parent.glob(f"*/data/*/{file}")
    return str(next(iter(sorted(found)), synthetic))


@functools.lru_cache(maxsize=4)
def load(name: str, limit: int | None) -> tuple[Trace, int]:
    trace = read_trace(trace_file(name), limit=limit)
    return trace, trace.working_set_tokens


def settings_of(
    sizes: Sequence[float], working_set: int, forms: tuple[Form, ...] = FORMS, recompute: Recompute = "all"
) -> Settings:
    """The machine of every benchmark, with tiers of so many percent of the working set; 0: no such tier."""
    capacity = {
        tier: int(working_set * size / 100) * SLOT_BYTES for tier, size in zip(Tier, sizes, strict=False) if size > 0
    }
    return Settings(Machine(capacity, COSTS, NOISE), SLOT_BYTES, forms, recompute=recompute)


def replay(run: Run) -> Result:
    trace, working_set = load(run.trace, run.limit)
    sizes = [tier for tier, size in zip(Tier, run.sizes, strict=False) if size > 0]
    settings = settings_of(run.sizes, working_set, run.forms, "all" if run.may_recompute else "none")
    replayed = make_replay(trace, runs.Run(run.policy, run.alpha), settings)
    outcomes = list(replayed.run())
    tokens, total_s = sum(outcome.num_tokens for outcome in outcomes), sum(outcome.ttft_s for outcome in outcomes)
    return Result(
        run,
        len(outcomes),
        statistics.fmean(outcome.ttft_s for outcome in outcomes),
        statistics.fmean(outcome.quality for outcome in outcomes),
        statistics.fmean([outcome.quality for outcome in outcomes if outcome.hit_tokens] or [1.0]),
        tuple(sum(outcome.hit_tokens.get(tier, 0) for outcome in outcomes) / tokens for tier in sizes),
        sum(outcome.regret_s for outcome in outcomes) / total_s,
        sum(outcome.predicted_regret_s for outcome in outcomes) / total_s,
        replayed.reuse.model.typical_gap_s,
    )


def in_processes(call: Callable[[T], R], items: Iterable[T], processes: int | None = None) -> Iterator[R]:
    """Results of the call for each item, in order, by as many processes as there are cores. RuntimeError where one of
    them dies: ``multiprocessing.Pool`` would wait for it for ever."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(call, items)


def replay_all(wanted: Sequence[Run], processes: int | None = None) -> Iterator[Result]:
    """The results in order, by as many processes as there are cores."""
    return in_processes(replay, wanted, processes)
