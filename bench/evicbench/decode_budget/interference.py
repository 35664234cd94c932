"""Interference of budgets with other requests: their hits and answers, beside long answers that drop KV."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from evicbench.decode_budget.requests import Request, ask_all, context_prompt, server_flags
from evicbench.report import Line
from evicbench.testbed.server import Server

PAGE, POOL = 16, 4096
NUM_PREFIXES, PREFIX = 4, 320
NUM_OTHERS, NUM_LONG, NUM_NEW_OTHERS, NUM_NEW_LONG = 20, 6, 12, 900
LONG, BUDGET = 200, 96
PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of the other requests: cached tokens and answers, one each; ``long_cached``: hits of the long prompts."""

    cached: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    num_meeting: int

    @property
    def hit_rate(self) -> float:
        return sum(self.cached) / (NUM_OTHERS * PREFIX)


def others(server: Server, prefixes: Sequence[list[int]], long: Sequence[Request], draw: random.Random) -> Seen:
    """Ask about the prefixes, one question after the other, while the long ones run."""
    server.flush()
    for prefix in prefixes:
        server.generate(prefix, 1)
    requests = [[*prefixes[number % NUM_PREFIXES], *context_prompt(draw, 12)] for number in range(NUM_OTHERS)]
    given: list[Any] = []
    num_meeting = 0
    with ThreadPoolExecutor(1) as background:
        job = background.submit(ask_all, server, long, name="long") if long else None
        for request in requests:
            if job is not None and not job.done():
                num_meeting += 1
            given.append(server.generate(request, NUM_NEW_OTHERS))
            time.sleep(PERIOD_S if job is not None and not job.done() else 0)
        if job is not None:
            job.result()
    cached = tuple(answer["meta_info"]["cached_tokens"] for answer in given)
    return Seen(cached, tuple(tuple(answer["output_ids"]) for answer in given), num_meeting)


def line(alone: Seen, beside: Seen, unbudgeted: Seen) -> Line:
    same_hits = sum(one == other for one, other in zip(alone.cached, beside.cached, strict=True))
    same = sum(one == other for one, other in zip(alone.answers, beside.answers, strict=True))
    return Line(
        f"neighbours: {NUM_OTHERS} questions on {NUM_PREFIXES} shared prefixes of {PREFIX} tokens beside {NUM_LONG} "
        f"answers of {NUM_NEW_LONG} tokens at a budget of {BUDGET}, pool of {POOL:,}",
        "cached tokens and answers of all as without them",
        f"{same_hits} and {same} of {NUM_OTHERS} ({beside.num_meeting} asked while they ran); hit rate "
        f"{alone.hit_rate:.3f} alone, {beside.hit_rate:.3f} beside them, {unbudgeted.hit_rate:.3f} where they have no "
        f"budget",
        same_hits == same == NUM_OTHERS and beside.num_meeting >= NUM_OTHERS // 2 and alone.hit_rate > 0.9,
    )


def after_line(server: Server, long: Sequence[Request], others_of: Sequence[Any]) -> Line:
    """``others_of``: the answers to the same prompts from a server that had not seen them."""
    hits = sum(answer["meta_info"]["cached_tokens"] // PAGE == (LONG + 4) // PAGE for answer, _ in others_of)
    same = sum(answer["output_ids"] == fresh["output_ids"] for answer, fresh in others_of)
    violations = server.post("/evicpress/check")["violations"]
    return Line(
        f"neighbours: questions without a budget on the {len(long)} prompts that were answered within one",
        "all pages of the prompt found, answers those of a flushed cache, tree and pool in order",
        f"{hits} and {same} of {len(long)}, {len(violations)} violations",
        hits == same == len(long) and not violations,
    )


def measure() -> Iterator[Line]:
    draw = random.Random("neighbours")
    prefixes = [context_prompt(draw, PREFIX) for _ in range(NUM_PREFIXES)]
    long = [
        Request(context_prompt(draw, LONG), NUM_NEW_LONG, BUDGET, method, interval=32)
        for _, method in zip(range(NUM_LONG), ("paged", "repack", "holefill") * NUM_LONG, strict=False)
    ]
    # Room for the prefixes, the others and the long ones within their budget, not for the long ones in full.
    with Server(*server_flags(PAGE, POOL, 16)) as server:
        alone = others(server, prefixes, (), random.Random("questions"))
        unbudgeted = others(
            server, prefixes, [replace(request, budget=0) for request in long], random.Random("questions")
        )
        beside = others(server, prefixes, long, random.Random("questions"))
        yield line(alone, beside, unbudgeted)
        requests = [[*request.prompt, *context_prompt(draw, 4)] for request in long]
        found = [server.generate(request, NUM_NEW_OTHERS) for request in requests]
        server.flush()
        fresh = [server.generate(request, NUM_NEW_OTHERS) for request in requests]
        yield after_line(server, long, list(zip(found, fresh, strict=True)))
