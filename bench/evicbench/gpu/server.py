"""Real servers on the GPU with the shapes of real models and random weights.

TTFT on a long shared context from GPU, host, SSD and computed anew at several kept fractions; inter-token latency with
and without holes at the same physical length, beside stock SGLang; what planning a step costs; load back against the
copy rate; a storm of evictions; codecs below the GPU; many clients beside SGLang's own caches. Answers of random
weights mean nothing: correctness is ``evicbench.gpu.correctness``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from evicbench.gpu.figures import Figure, Part, Sample, check, missing
from evicbench.gpu.machine import Settings, run_phase, settings, time_calls
from evicbench.gpu.models import LLAMA_8B, QWEN_14B, Model
from evicbench.gpu.serving import Prompts, Server, compress_all
from evicbench.gpu.subject import KEPT, PRESS, Subject, integrity, subject_of
from evicbench.gpu.systems import SYSTEMS, measure_system
from evicbench.gpu.watch import Loaded, Plan, Watch, watched
from evicbench.moves import nodes_of, push_all, sources, wait_until_idle
from evicbench.streams import Streamed, stream
from evicbench.stress import started
from evicbench.testbed.server import GUESSED

TIERS = ("gpu", "host", "ssd")
MOST_STEP_RATIO = 1.03
MOST_PLAN_RATIO = 1.05
MIN_LOAD_SHARE = 0.85
CODECS = ("int8", "int4", "lossless")
ROUNDS = {"gpu": 7, "host": 5, "ssd": 3, "computed": 3}


# ---- TTFT by tier


def measure_tiers(chosen: Settings, subject: Subject) -> Iterator[Figure]:
    copy_rate = host_to_device_rate(chosen)
    if chosen.device == "cuda":
        torch.cuda.empty_cache()  # the server may have it all
    log = chosen.out / f"{subject.folder.name}-tiers.log"
    with tempfile.TemporaryDirectory(prefix="evicpress-ssd-") as ssd, watched() as watch:
        tiers = ("--kv-host-gb", str(subject.host_gb), "--kv-ssd-dir", ssd, "--kv-ssd-gb", str(subject.ssd_gb))
        forms = ("--kv-forms", ",".join([subject.forms, *(f"exact+{codec}" for codec in codecs_of(chosen))]))
        with Server(subject.launch, *subject.policy, *forms, *tiers, log=log, env=watch.env) as server:
            yield from _measure_tiers(chosen, subject, server, watch, copy_rate)


def _measure_tiers(
    chosen: Settings, subject: Subject, server: Server, watch: Watch, copy_rate: float
) -> Iterator[Figure]:
    prompts = Prompts(chosen.seed, subject.vocabulary)
    for _ in range(2):  # kernels are compiled, costs are learned
        stream(server, prompts.draw(subject.context), 4)
    computed = _first_tokens(server, subject, prompts, "computed", [])
    yield _ttft_figure(subject, "computed anew", 1.0, computed)
    for kept in KEPT:
        server.flush()
        context = prompts.draw(subject.context)
        stream(server, context)
        wait_until_idle(server)
        num_slots = subject.context if kept == 1.0 else compress_all(server, f"{PRESS}@{kept}")
        at_gpu_s = 0.0
        for tier in TIERS:
            since = watch.num_lines
            answers = _first_tokens(server, subject, prompts, tier, context)
            yield _ttft_figure(subject, f"from {tier}", kept, answers, computed)
            if tier == "gpu":
                at_gpu_s = _median_first(answers)
            if tier == "host":
                extra_s = max(1e-9, _median_first(answers) - at_gpu_s)
                yield _load_figure(subject, kept, watch.loads(since), copy_rate, extra_s, num_slots)
    yield from _measure_codecs(chosen, subject, server, watch, prompts)
    described = server.get("/evicpress/tiers")
    pinned, errors = bool(described["tiers"]["host"]["is_pinned"]), described["errors"]
    if chosen.device == "cuda":
        yield check(f"{subject.name}: host memory is pinned", pinned, str(pinned), "pinned")
    yield check(f"{subject.name}: errors of the tiers", not errors, json.dumps(errors), "none")
    yield integrity(subject, "tiers", server)


def _measure_codecs(
    chosen: Settings, subject: Subject, server: Server, watch: Watch, prompts: Prompts
) -> Iterator[Figure]:
    """Exact KV by the codec that it is stored with below the GPU."""
    for codec in codecs_of(chosen):
        server.flush()
        context = prompts.draw(subject.context)
        stream(server, context)
        for tier in TIERS[1:]:
            since = watch.num_lines
            answers = _first_tokens(server, subject, prompts, tier, context, codec)
            yield _ttft_figure(subject, f"stored by {codec}, from {tier}", 1.0, answers)
            if tier == "host" and (loads := [load for load in watch.loads(since) if load.seconds > 0]):
                yield Figure(
                    f"{subject.name}: load back from host, stored by {codec}",
                    1e3 * statistics.median(load.seconds for load in loads),
                    "ms from the first copy to the last row",
                    detail=f"{max(load.num_bytes for load in loads) / 1e9:.2f} GB, "
                    f"{1e3 * statistics.median(load.thread_s for load in loads):.1f} ms of CPU to queue",
                )


def codecs_of(chosen: Settings) -> tuple[str, ...]:
    return CODECS[:2] if chosen.device == "cpu" else CODECS  # lossless stores bfloat16


def _first_tokens(
    server: Server, subject: Subject, prompts: Prompts, tier: str, context: list[int], codec: str | None = None
) -> list[Streamed]:
    """Answers to new questions about a context that is put on the tier before each, as a codec stores it."""
    answers = []
    for _ in range(ROUNDS[tier]):
        if tier == "computed":
            server.flush()
            context = prompts.draw(subject.context)
        elif tier != "gpu" and (above := push_all(server, tier, codec)) and len(above) == len(nodes_of(server)):
            raise server.error(f"the context could not be put on {tier}: nodes {above[:3]} stay elsewhere")
        answers.append(stream(server, context + prompts.draw(subject.question)))
        if tier != "computed":
            wait_until_idle(server)
    return answers


def _ttft_figure(
    subject: Subject, what: str, kept: float, answers: Sequence[Streamed], computed: Sequence[Streamed] = ()
) -> Figure:
    sample = Sample(tuple(1e3 * answer.first_s for answer in answers))
    ratio = f"{sample.median / (1e3 * _median_first(computed)):.3f} of computing; " if computed else ""
    found = [sources(answer.last) for answer in answers]
    return Figure(
        f"{subject.name}: TTFT of {subject.context} shared and {subject.question} new tokens, kept {kept}, {what}",
        sample.median,
        "ms",
        spread=sample.quartiles,
        detail=f"{ratio}{len(answers)} requests; tokens of the last from {found[-1]}",
        extra={"ms": list(sample.values), "sources": found},
    )


def _load_figure(
    subject: Subject, kept: float, loads: Sequence[Loaded], copy_rate: float, extra_s: float, num_slots: int
) -> Figure:
    """``extra_s``: by so much longer the client waits than for a hit on the GPU."""
    what = f"{subject.name}: load back from host, kept {kept}"
    target = f">= {MIN_LOAD_SHARE:.0%}"
    loads = [load for load in loads if load.seconds > 0]
    if not loads:
        return missing(what, "nothing was loaded: the server computed instead", target)
    largest = max(load.num_bytes for load in loads)
    rates = Sample(tuple(load.num_bytes / load.seconds for load in loads if 2 * load.num_bytes > largest))
    return Figure(
        what,
        100 * rates.median / copy_rate,
        "% of the host-to-device copy rate",
        target,
        rates.median >= MIN_LOAD_SHARE * copy_rate,
        f"{rates.median / 1e9:.1f} of {copy_rate / 1e9:.1f} GB/s, {largest / 1e9:.2f} GB a load of {num_slots} slots, "
        f"{1e3 * statistics.median(load.thread_s for load in loads):.1f} ms of CPU to queue, "
        f"layer by layer while the batch computes; the client waits {1e3 * extra_s:.1f} ms longer than for a hit on "
        f"the GPU ({largest / extra_s / 1e9:.1f} GB/s, checksums and staging included)",
        is_timed=True,
    )


def host_to_device_rate(chosen: Settings) -> float:
    """Bytes per second of a pinned copy, measured before a server takes the GPU."""
    size = 1 << (20 if chosen.tiny or chosen.device == "cpu" else 30)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=chosen.device == "cuda").random_()
    target = torch.empty(size, dtype=torch.uint8, device=chosen.device)
    return size / time_calls(lambda: target.copy_(host, non_blocking=True), chosen.device, repeats=10).median


# ---- steps


LABELS = ("without holes", "with holes")


@dataclass(frozen=True, slots=True)
class Stepper:
    """A running server and contexts that it answers about, by the size of the batch."""

    label: str
    server: Server
    contexts: dict[int, list[int]]


def measure_steps(chosen: Settings, subject: Subject) -> Iterator[Figure]:
    """Inter-token latency and planning, at the same physical length: stock, ours without holes, ours with half."""
    lengths = {1: subject.context // 2, subject.batch: subject.batch_rows // subject.batch}
    steps: dict[tuple[str, int], list[float]] = defaultdict(list)
    plans: dict[str, list[Plan]] = {}
    prompts = Prompts(chosen.seed, subject.vocabulary)

    def measure(stepper: Stepper, rounds: int = 1) -> None:
        for batch, context in stepper.contexts.items():
            taken = (step_seconds(stepper.server, context, prompts, subject, batch) for _ in range(rounds))
            steps[stepper.label, batch] += taken

    def prepared(label: str, server: Server, factor: int = 1) -> Stepper:
        contexts = {batch: prompts.draw(factor * length) for batch, length in lengths.items()}
        for context in contexts.values():
            stream(server, context, 4)
        return Stepper(label, server, contexts)

    logs = [chosen.out / f"{subject.folder.name}-{which}.log" for which in ("stock", "steps")]
    with ExitStack() as every:
        stock_stack = every.enter_context(ExitStack())
        stock_watch = every.enter_context(watched(is_stock=True))
        both = subject.fits_twice and chosen.device == "cuda"
        first = replace(subject.launch, memory=0.45) if both else subject.launch
        stock = prepared("stock", stock_stack.enter_context(Server(first, log=logs[0], env=stock_watch.env)))
        if not subject.fits_twice:
            measure(stock, 5)
            stock_stack.close()
        watch = every.enter_context(watched())
        server = every.enter_context(Server(subject.launch, *subject.policy, log=logs[1], env=watch.env))
        # One server serves both: what is planned with holes and without is told apart by when it was asked for.
        for label in LABELS:
            server.flush()
            stepper = prepared(label, server, 2 if label == "with holes" else 1)
            if label == "with holes":
                compress_all(server, f"{PRESS}@0.5")
            since = watch.num_lines
            for _ in range(5):
                if subject.fits_twice:
                    measure(stock)
                measure(stepper)
            plans[label] = watch.plans(subject.batch, since)
        plans["stock"] = stock_watch.plans(subject.batch)
        yield integrity(subject, "steps", server)
    for batch, length in lengths.items():
        yield from _step_figures(subject, {label: steps[label, batch] for label in ("stock", *LABELS)}, batch, length)
    yield from _plan_figures(subject, plans)


def step_seconds(server: Server, context: list[int], prompts: Prompts, subject: Subject, batch: int) -> float:
    """Median over a batch of a request's mean inter-token latency, of requests that decode together."""
    questions = [context + prompts.draw(subject.question) for _ in range(batch)]
    with ThreadPoolExecutor(batch) as clients:
        answers = list(clients.map(lambda ids: stream(server, ids, subject.answer), questions))
    return statistics.median(statistics.fmean(answer.steps_s) for answer in answers)


def _step_figures(subject: Subject, steps: dict[str, list[float]], batch: int, length: int) -> Iterator[Figure]:
    samples = {label: Sample(tuple(1e3 * seconds for seconds in found)) for label, found in steps.items()}
    stock, where = samples.pop("stock"), f"batch {batch}, {length} physical tokens each"
    yield Figure(f"{subject.name}: ITL of stock, {where}", stock.median, "ms", spread=stock.quartiles)
    for label, ours in samples.items():
        ratio = ours.median / stock.median
        yield Figure(
            f"{subject.name}: ITL {label}, {where}",
            ratio,
            "of stock",
            f"<= {MOST_STEP_RATIO}",
            ratio <= MOST_STEP_RATIO,
            f"{ours.median:.3f} ms ({ours.quartiles[0]:.3f} to {ours.quartiles[1]:.3f})",
            is_timed=True,
        )


def _plan_figures(subject: Subject, plans: dict[str, list[Plan]]) -> Iterator[Figure]:
    for field, what in (("host_s", "call"), ("device_s", "GPU time line")):
        times = {label: [getattr(plan, field) for plan in found] for label, found in plans.items()}
        stock, target = times["stock"], f"<= {MOST_PLAN_RATIO}"
        for label in LABELS:
            name = f"{subject.name}: metadata of a step {label}, {what}, batch {subject.batch}"
            ours = times[label]
            if not (stock and ours):
                yield missing(name, "no step of that batch was planned", target)
                continue
            ratio = statistics.median(ours) / statistics.median(stock)
            yield Figure(
                name,
                ratio,
                "of stock",
                target,
                ratio <= MOST_PLAN_RATIO,
                f"{1e6 * statistics.median(ours):.0f} us of {len(ours)} steps against "
                f"{1e6 * statistics.median(stock):.0f} of {len(stock)}; {subject.batch_rows} tokens in all rows",
                is_timed=True,
            )


# ---- storm


def measure_storm(chosen: Settings, subject: Subject, seconds: float = 60.0) -> Iterator[Figure]:
    """Clients with more contexts than fit anywhere, on a pool that must evict, compress and move all the time."""
    length, clients, pool, host_gb, ssd_gb = 4096, 32, 65536, 8.0, 16.0
    if chosen.device == "cpu":
        seconds, length, clients, pool, host_gb, ssd_gb = 8.0, 300, 4, 3000, 0.02, 0.1
    what, log = f"{subject.name}: eviction storm", chosen.out / f"{subject.folder.name}-storm.log"
    flags = ("--kv-policy", "evicpress", *GUESSED, "--kv-forms", subject.forms, "--max-total-tokens", str(pool))
    with tempfile.TemporaryDirectory(prefix="evicpress-ssd-") as ssd:
        tiers = ("--kv-host-gb", str(host_gb), "--kv-ssd-dir", ssd, "--kv-ssd-gb", str(ssd_gb))
        with Server(subject.launch, *flags, *tiers, log=log) as server:
            prompts = Prompts(chosen.seed, subject.vocabulary)
            contexts = [prompts.draw(length) for _ in range(6 * pool // length)]
            stream(server, contexts[0], 4)
            deadline = time.monotonic() + seconds
            answers, problems = list[Streamed](), list[str]()

            def client(number: int) -> None:
                mine = Prompts((chosen.seed, number), subject.vocabulary)
                while time.monotonic() < deadline:
                    context = contexts[min(int(len(contexts) * mine.chance() ** 2), len(contexts) - 1)]
                    try:
                        answers.append(stream(server, context + mine.draw(subject.question), 16))
                    except (OSError, RuntimeError) as error:
                        problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])

            for thread in started([partial(client, number) for number in range(clients)]):
                thread.join()
            decisions = server.get("/evicpress/stats")["decisions"]
            said = f"{len(answers)} answers in {seconds:g} s by {clients} clients, {len(problems)} failed"
            said += f", first {problems[0]}" if problems else ""
            yield check(f"{what}, every request answered", bool(answers) and not problems, said, "none fails")
            if answers:
                first = Sample(tuple(1e3 * answer.first_s for answer in answers))
                said = f"decisions {json.dumps(decisions)}"
                yield Figure(f"{what}, TTFT", first.median, "ms", spread=first.quartiles, detail=said)
            freed = decisions["dropped"] + sum(decisions["compressed"].values()) + sum(decisions["demoted"].values())
            yield check(f"{what}, the policy had to decide", freed > 0, f"{freed} decisions", "more than 0")
            yield integrity(subject, "storm", server)
            wait_until_idle(server)
            server.flush()
            stats = server.get("/evicpress/stats")
            free, total = stats["free_slots"], stats["total_slots"]
            yield check(f"{what}, every slot is free after a flush", free == total, f"{free} of {total}", "all")


# ---- shared


def _median_first(answers: Sequence[Streamed]) -> float:
    return statistics.median(answer.first_s for answer in answers)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = settings(__doc__, arguments)
    with tempfile.TemporaryDirectory(prefix="evicpress-models-") as made:

        def part(
            name: str, model: Model, targets: tuple[str, ...], measure: Callable[[Settings, Subject], Iterator[Figure]]
        ) -> Part:
            subject = subject_of(model, chosen, Path(made))
            lines = tuple(f"{subject.name}: {target_text}" for target_text in targets)
            return Part(f"{'llama' if model is LLAMA_8B else 'qwen'} {name}", lines, lambda: measure(chosen, subject))

        def parts() -> list[Part]:
            steps = ("ITL of stock", "ITL without holes", "ITL with holes", "metadata of a step with holes")
            tiers = (*(f"load back from host, kept {kept}" for kept in KEPT), "TTFT")
            storm = ("eviction storm, every request answered",)
            return [
                part("tiers", LLAMA_8B, tiers, measure_tiers),
                part("steps", LLAMA_8B, steps, measure_steps),
                part("storm", LLAMA_8B, storm, measure_storm),
                *(
                    part(f"clients {name}", LLAMA_8B, (f"many clients, {name}",), partial(measure_system, name=name))
                    for name in SYSTEMS
                ),
                part("tiers", QWEN_14B, tiers, measure_tiers),
                part("steps", QWEN_14B, steps, measure_steps),
            ]

        return run_phase("server", chosen, parts)


if __name__ == "__main__":
    sys.exit(main())
