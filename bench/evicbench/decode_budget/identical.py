"""Answers from caches that are compacted while they grow, against transformers over the same survivors as they lay."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evicbench.correctness.findings import TOLERANCE, Finding, judged
from evicbench.correctness.reference import Reference, make_peaky_model
from evicbench.decode_budget.generation import check_answer
from evicbench.decode_budget.requests import PLAIN_SCORES, Request, ask_all, prompt_for, server_flags, shown_of
from evicbench.report import Line
from evicbench.stress import CHECKS
from evicbench.testbed.server import MODEL, Server
from sglang_evicpress.decode_budget.settings import METHODS

EVERY = (16, 24, 40)
NUM_PROMPTS = 25  # with a budget, of each server
NUM_PLAIN = 3
NUM_SPOILED = 4
NUM_NEW = (110, 150)
LEAST_DIFFERING = 0.9


@dataclass(frozen=True, slots=True)
class Setup:
    """One server. ``flags`` and ``env`` change what the scheduler does around the budgets."""

    model: str
    page_size: int
    what: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


SETUPS = (
    Setup("testbed", 16, "as it comes"),
    Setup("testbed", 64, "no overlap", ("--disable-overlap-schedule",)),
    Setup("random", 1, "mixed chunks of 64", ("--chunked-prefill-size", "64", "--enable-mixed-chunk")),
    Setup(
        "random",
        32,
        "one request sent back every 60 steps",
        env=(("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "60")),
    ),
)


def arguments(page_size: int) -> tuple[str, ...]:
    """Room for all queries that tova and h2o want kept."""
    more = ("--kv-decode-score", "tova", "--kv-decode-interval", str(min(EVERY)), "--kv-decode-client-budgets", "trace")
    return server_flags(page_size, 16384, 8, *more)


def draw_requests(model: Path, page_size: int, seed: int) -> list[Request]:
    """All methods and scores take turns; every fourth prompt continues one that is in the tree."""
    draw = random.Random(f"identical {seed}")
    shared = prompt_for(model, draw, 160)
    pairs = list(itertools.product(METHODS, PLAIN_SCORES))
    draw.shuffle(pairs)
    requests = []
    for number, (method, score) in zip(range(NUM_PROMPTS), itertools.cycle(pairs), strict=False):
        least = 4 * page_size if method == "paged" else 48 + page_size
        budget, interval = max(least, 48) + draw.randrange(60), draw.choice(EVERY)
        num_new = draw.randint(*NUM_NEW)
        shortest = max(30, budget + interval + page_size + 1 - num_new)  # or nothing would be dropped
        length = draw.randint(shortest, shortest + 100)
        prompt = prompt_for(model, draw, length)
        if number % 4 == 0:
            prompt = [*shared, *prompt[: max(20, length - len(shared))]]
        requests.append(Request(prompt, num_new, budget, method, score, interval))
    return requests + [Request(prompt_for(model, draw, 100), 60) for _ in range(NUM_PLAIN)]


@dataclass(slots=True)
class Outcome:
    """``controls``: differences that a wrong cache would have made, full or with survivors swapped."""

    findings: list[Finding]
    kinds: set[str]
    num_retracted: int
    full: list[Finding]
    spoiled: list[Finding]


def compare(setup: Setup, model: Path, reference: Reference, seed: int) -> Outcome:
    requests = draw_requests(model, setup.page_size, seed)
    with Server(*arguments(setup.page_size), *setup.flags, model=model, env={**CHECKS, **dict(setup.env)}) as server:
        ask_all(server, [Request(requests[0].prompt[:160], 1)], name="shared")
        answers = ask_all(server, requests, is_traced=True)
        shown = [shown_of(server, f"r{index}") if request.budget else None for index, request in enumerate(requests)]
        check = server.post("/evicpress/check")
    outcome = Outcome([], set(), 0, [], [])
    if not check["ok"]:
        outcome.findings.append(Finding("integrity", tuple(map(str, check["violations"]))))
    for index, (request, answer, told) in enumerate(zip(requests, answers, shown, strict=True)):
        _compare_one(outcome, reference, request, answer, told, setup.page_size, f"{setup.model}, r{index}")
    return outcome


def _compare_one(
    outcome: Outcome, reference: Reference, request: Request, answer: Any, told: Any, page_size: int, name: str
) -> None:
    outcome.findings.append(check_answer(reference, request, answer, told, page_size, name=name))
    if told is None:
        return
    kinds = {record["kind"] for record in told["trace"]}
    outcome.kinds |= kinds
    outcome.num_retracted += len(told["retracted_at"])
    if not kinds or told["is_trace_cut"]:
        outcome.findings[-1] = replace(outcome.findings[-1], problems=("nothing was dropped, or not all was told",))
        return
    outcome.full.append(check_answer(reference, request, answer, told, page_size, is_full=True))
    if kinds - {"page"} and len(outcome.spoiled) < NUM_SPOILED:
        # The selection check would refuse a spoiled trace; here the reference's own cache is spoiled behind it.
        outcome.spoiled.append(check_answer(reference, request, answer, told, page_size, spoil=True))


def exact_line(setup: Setup, outcome: Outcome) -> Line:
    ok, worst, said = judged(outcome.findings)
    figure = f"{said}; {worst:.1e}; passes of kinds {', '.join(sorted(outcome.kinds))}"
    if outcome.num_retracted:
        figure += f"; sent back {outcome.num_retracted} times"
    return Line(
        f"token-identical: {NUM_PROMPTS} prompts with a budget and {NUM_PLAIN} without side by side, all methods "
        f"and scores, {setup.model} model, pages of {setup.page_size}, {setup.what}; survivors checked but for r_kv",
        f"no token another than transformers' over the same survivors uncompacted, log probabilities within "
        f"{TOLERANCE:.0e}",
        figure,
        ok and {"copy_out", "page", "repack", "holefill"} <= outcome.kinds,
    )


def control_line(outcomes: Sequence[Outcome]) -> Line:
    """That another cache would have been seen."""
    full = [finding for outcome in outcomes for finding in outcome.full]
    spoiled = [finding for outcome in outcomes for finding in outcome.spoiled]
    seen_full, seen_spoiled = (sum(not finding.ok for finding in findings) for findings in (full, spoiled))
    return Line(
        "token-identical, controls: the same answers against the full cache, and with one survivor per head swapped",
        f"at least {LEAST_DIFFERING:.0%} of each seen to differ",
        f"{seen_full} of {len(full)}, {seen_spoiled} of {len(spoiled)}",
        seen_full >= LEAST_DIFFERING * len(full) and bool(spoiled) and seen_spoiled >= LEAST_DIFFERING * len(spoiled),
    )


def measure(setups: Sequence[Setup] = SETUPS) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        models = {"testbed": MODEL, "random": make_peaky_model(Path(folder))}
        references = {name: Reference(path) for name, path in models.items()}
        outcomes = []
        for seed, setup in enumerate(setups):
            outcomes.append(compare(setup, models[setup.model], references[setup.model], seed))
            yield exact_line(setup, outcomes[-1])
        yield control_line(outcomes)
