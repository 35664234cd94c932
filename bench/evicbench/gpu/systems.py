"""Many clients of one server whose contexts do not fit the GPU: SGLang's LRU, its HiCache, and our policy.

The same contexts, asked for in the same order by each client, popular ones more often; every system has the same GPU
pool, those with host RAM the same. Weights are random, so no quality is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from evicbench.gpu.figures import Figure, Sample, check, missing
from evicbench.gpu.machine import Settings
from evicbench.gpu.serving import Prompts, Server
from evicbench.gpu.subject import Subject, integrity
from evicbench.streams import Streamed, stream
from evicbench.stress import FAILURES, started
from sglang_evicpress.quantiles import quantile

ANSWER = 16

_EVICPRESS = ("--kv-policy", "evicpress", "--kv-disable-online-profiling", "--kv-host-gb", "{host_gb}")
SYSTEMS: dict[str, tuple[str, ...]] = {
    "lru": (),
    "hicache": ("--enable-hierarchical-cache", "--hicache-size", "{host_gb}", "--page-size", "64"),
    "evicpress, exact KV": (*_EVICPRESS, "--kv-quality", "1"),
    "evicpress, exact KV or int4 below the GPU": (
        *(*_EVICPRESS, "--kv-alpha", "1", "--kv-forms", "exact+int4", "--kv-quality-curves", "{curves}"),
    ),
}
"""Flags by name. HiCache has pages of 64, as its documentation advises."""

CURVES = {"exact+int4": 0.98}
"""Random weights have no quality: what int4 is taken to keep."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes: tokens of a context and of the GPU pool, contexts, clients, host RAM, seconds that are measured."""

    length: int
    pool: int
    num_contexts: int
    num_clients: int
    host_gb: float
    seconds: float


LOAD = Load(4096, 131072, 96, 24, 16, 20.0)
SMALL = Load(300, 3000, 80, 4, 0.05, 5.0)


def measure_system(chosen: Settings, subject: Subject, name: str) -> Iterator[Figure]:
    load = SMALL if chosen.device == "cpu" else LOAD
    curves = chosen.out / "curves.json"
    curves.write_text(json.dumps(CURVES))
    flags = [flag.format(host_gb=load.host_gb, curves=curves) for flag in SYSTEMS[name]]
    what = f"{subject.name}: many clients, {name}"
    if name == "hicache" and chosen.device == "cpu":
        yield missing(what, "its kernels are for GPUs")
        return
    log = chosen.out / f"{subject.folder.name}-clients-{list(SYSTEMS).index(name)}.log"
    prompts = Prompts(chosen.seed, subject.vocabulary)
    contexts = [prompts.draw(load.length) for _ in range(load.num_contexts)]
    answers, problems = list[Streamed](), list[str]()
    given = ("--max-total-tokens", str(load.pool), "--enable-cache-report", *flags)
    with Server(subject.launch, *given, log=log) as server:
        with ThreadPoolExecutor(load.num_clients) as clients:
            list(clients.map(lambda context: stream(server, [*context, *context[:8]], ANSWER), contexts))
        begin = time.monotonic()

        def client(number: int) -> None:
            mine = Prompts((chosen.seed, number), subject.vocabulary)
            while time.monotonic() < begin + load.seconds:
                context = contexts[int(len(contexts) * mine.chance() ** 2)]
                try:
                    answers.append(stream(server, context + mine.draw(subject.question), ANSWER))
                except FAILURES as error:
                    problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])

        for thread in started([partial(client, number) for number in range(load.num_clients)]):
            thread.join()
        seconds = time.monotonic() - begin
        yield check(f"{what}, every request answered", not problems, str(problems[:1] or "all"), "none fails")
        if answers:
            yield _figure(what, load, answers, seconds, server)
        if name.startswith("evicpress"):
            yield integrity(subject, name, server)


def _figure(what: str, load: Load, answers: list[Streamed], seconds: float, server: Server) -> Figure:
    first = Sample(tuple(1e3 * answer.first_s for answer in answers))
    meta = [answer.last["meta_info"] for answer in answers]
    cached = sum(each["cached_tokens"] for each in meta) / sum(each["prompt_tokens"] for each in meta)
    said = f"{len(answers)} answers in {seconds:.0f} s by {load.num_clients} clients; TTFT {first.median:.0f} ms"
    said += f" ({quantile(first.values, 0.95):.0f} at 95 %); {cached:.1%} of prompt tokens cached"
    if "evicpress" in what:
        decisions = server.get("/evicpress/stats")["decisions"]
        said += f"; decisions {json.dumps({name: decisions[name] for name in ('compressed', 'demoted', 'dropped')})}"
    size = {"context": load.length, "contexts": load.num_contexts, "pool": load.pool, "host_gb": load.host_gb}
    return Figure(f"{what}, answers per second", len(answers) / seconds, "", detail=said, extra=size)
