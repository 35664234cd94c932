"""Many long answers in a pool with room for eight: how many run at once with a budget of an eighth, and without."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evicbench.decode_budget.requests import Request, ask_all, context_prompt, server_flags
from evicbench.report import Line
from evicbench.testbed.server import Server

PROMPT, NUM_NEW, NUM_FULL, NUM_REQUESTS, PAGE = 64, 448, 8, 48, 16
POOL = NUM_FULL * (PROMPT + NUM_NEW)
BUDGET = (PROMPT + NUM_NEW) // 8
LEAST_TIMES = 4
NUM_PAIRS = 3
RUNNING = re.compile(r"Decode batch.*#running-req: (\d+)")
RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


@dataclass(frozen=True, slots=True)
class Run:
    """``most_running`` requests at once, ``num_retracted`` retracted, ``num_done`` answered in full in ``seconds``."""

    most_running: int
    num_retracted: int
    num_done: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_done * NUM_NEW / self.seconds


def arguments(budget: int) -> tuple[str, ...]:
    """Both servers may run all requests, and tell of every step."""
    own = ("--kv-decode-budget", str(budget)) if budget else ()
    return server_flags(PAGE, POOL, NUM_REQUESTS, "--decode-log-interval", "1", *own)


def run(server: Server, prompts: Sequence[Sequence[int]]) -> Run:
    server.flush()
    told = len(server.log.read_text(errors="replace"))
    began = time.perf_counter()
    answers = ask_all(server, [Request(prompt, NUM_NEW) for prompt in prompts])
    seconds = time.perf_counter() - began
    if not server.is_alive():
        raise RuntimeError(f"the server died:\n{server.log_tail()}")
    done = sum(len(answer["output_ids"]) == NUM_NEW for answer in answers)
    return read_log(server.log.read_text(errors="replace")[told:], done, seconds)


def read_log(log: str, num_done: int, seconds: float) -> Run:
    """Figures of a run from SGLang's own log."""
    running = max(map(int, RUNNING.findall(log)), default=0)
    return Run(running, sum(map(int, RETRACTED.findall(log))), num_done, seconds)


def lines(full: Sequence[Run], budgeted: Sequence[Run]) -> Iterator[Line]:
    most = min(each.most_running for each in budgeted)
    retracted = sum(each.num_retracted for each in budgeted)
    done = min(each.num_done for each in budgeted)
    yield Line(
        f"room: {NUM_REQUESTS} requests of {PROMPT} + {NUM_NEW} tokens, pool of {POOL:,} slots, paged to {BUDGET}, "
        f"--max-running-requests {NUM_REQUESTS}; the fewest of {len(budgeted)} runs",
        f">= {LEAST_TIMES * NUM_FULL} at once where {NUM_FULL} fit in full, all answered, none sent back",
        f"{most} at once, {done} answered, {retracted} sent back; full cache {max(each.most_running for each in full)} "
        f"at once, {sum(each.num_retracted for each in full)} sent back in {len(full)} runs",
        most >= LEAST_TIMES * NUM_FULL and done == NUM_REQUESTS and retracted == 0,
    )
    ratios = [each.tokens_per_s / other.tokens_per_s for each, other in zip(budgeted, full, strict=True)]
    speeds = [statistics.median(each.tokens_per_s for each in runs) for runs in (full, budgeted)]
    rates = [statistics.median(each.num_done / each.seconds for each in runs) for runs in (full, budgeted)]
    yield Line(
        f"throughput of these: budget over full cache, the same requests, {len(ratios)} pairs",
        "median > 1 (the paper: 1.37 at a budget of 1,024, up to 3.1)",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {speeds[1]:.0f} against "
        f"{speeds[0]:.0f} tokens/s, {rates[1]:.2f} against {rates[0]:.2f} requests/s",
        statistics.median(ratios) > 1,
    )


def measure() -> Iterator[Line]:
    draw = random.Random("room")
    full: list[Run] = []
    budgeted: list[Run] = []
    with Server(*arguments(0)) as without, Server(*arguments(BUDGET)) as within:
        for number in range(NUM_PAIRS):
            prompts = [context_prompt(draw, PROMPT) for _ in range(NUM_REQUESTS)]
            pair = [(without, full), (within, budgeted)]
            for server, runs in pair if number % 2 == 0 else reversed(pair):
                runs.append(run(server, prompts))
    yield from lines(full, budgeted)
