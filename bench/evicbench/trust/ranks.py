"""Two tensor-parallel ranks with tiers, each with delays, faults and a disk of its own: they must decide alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from evicbench.pytest_runs import passed
from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.tiers import chaos
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Question
from evicbench.tiers.ttft import Case, Clock, arguments
from evicbench.trust.rank_states import compared

SECONDS = 600.0
NUM_QUESTIONS = 120
NUM_TOKENS = 1024

TWO_RANKS = ("--tp-size", "2")
RANKS_ON_CPU = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_NCCL_SO_PATH": "/none",
}
"""SGLang wants to know the cores of each rank, and would talk to GPUs if it found NCCL."""

FAULTS = (
    "seed=1,delay=0.1:0.02,eio=0.01,enospc=0.01,short=0.02,flip=0.06,lost=0.01",
    "seed=2,delay=0.3:0.05,eio=0.03,flip=0.02,lost=0.02",
)
"""Of each rank."""


BUDGET = 512
BUDGET_SECONDS = 120.0


class RankChaos(chaos.Chaos):
    """Its checks compare what ranks have decided: journal, nodes and slots."""

    def _detach_and_attach(self) -> None:
        """Refused with several ranks."""


class BudgetChaos(RankChaos):
    """Requests drop KV while they run where they are longer than the budget."""

    def is_judged(self, question: Question, num_tokens: int) -> bool:
        return len(question.prompt) + num_tokens <= BUDGET


def measure_agreement(
    seconds: float = SECONDS, *, page_size: int = 1, more: tuple[str, ...] = (), make: type[RankChaos] = RankChaos
) -> Iterator[Line]:
    with compared() as states:
        env = {**RANKS_ON_CPU, "SGLANG_EVICPRESS_FAULTS": "|".join(FAULTS), **states.env}
        found = chaos.storm(
            seconds,
            page_size=page_size,
            num_questions=NUM_QUESTIONS,
            more=(*TWO_RANKS, *more),
            env=env,
            make=make,
        )
        num_rounds, problems = states.num_rounds, [*states.differences, *found.problems]
    errors = {reason: count for reason, count in sorted(found.errors.items()) if count}
    loaded = [found.sources[place] for place in ("device", "host", "storage")]
    first = f"; first: {problems[0][:300]}" if problems else ""
    yield Line(
        f"two ranks with tiers, {''.join(f'{flag} ' for flag in more)}pages of {page_size}, "
        f"faults {' and '.join(FAULTS)}, for {seconds:g} s",
        "identical journals, nodes, jobs, slots and queues after every round, no hang, no wrong answer",
        f"{found.num_requests} requests ({found.num_tokens} tokens), {found.num_wrong} wrong, {found.num_hung} hung, "
        f"{num_rounds} rounds and {found.num_checks} checks, {len(problems)} problems; tokens from GPU, host, SSD: "
        f"{'/'.join(map(str, loaded))}; errors {errors}{first}",
        not problems and min(found.num_requests, num_rounds, found.num_checks, *loaded, len(errors)) > 0,
    )


def measure_budgets(seconds: float = BUDGET_SECONDS) -> Iterator[Line]:
    """Answers are compared where nothing is dropped: up to ``BUDGET`` tokens."""
    for page_size in (1, 16):
        more = ("--kv-decode-budget", str(BUDGET), "--kv-decode-interval", "16")
        yield from measure_agreement(seconds, page_size=page_size, more=more, make=BudgetChaos)


def measure_first_token() -> Iterator[Line]:
    cases = []
    for number in (1, 2):
        with scratch(1 << 29) as folder:
            cases.append(_case(folder / "ssd", number))
    alone, shared = ([1e3 * statistics.median(times) for times in (case.from_tier, case.computed)] for case in cases)
    yield Line(
        f"time to first token of {NUM_TOKENS} tokens on the host, at 2 ranks against 1, on the CPU",
        "printed",
        f"loaded {shared[0]:.0f} against {alone[0]:.0f} ms, computed {shared[1]:.0f} against {alone[1]:.0f} ms",
        all(case.is_loaded for case in cases),
    )


def _case(folder: Path, num_ranks: int) -> Case:
    more, env = (TWO_RANKS, RANKS_ON_CPU) if num_ranks > 1 else ((), {})
    with Server(*arguments(folder), *more, env=env) as server:
        clock = Clock(server, 0)
        clock.warm_up((NUM_TOKENS,))
        return clock.measure("host", NUM_TOKENS)


def measure() -> Iterator[Line]:
    walks = "two ranks without a model: random walks with faults on either, every decision and row compared"
    yield passed(walks, "all pass", "tests/contract/tiers/test_tier_ranks.py")
    yield from measure_agreement()
    yield from measure_budgets()
    yield from measure_first_token()
