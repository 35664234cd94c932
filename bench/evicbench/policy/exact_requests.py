"""Requests with ``kv_quality: "exact"`` on a real server that compresses under pressure: their answers are those of a
server without compression.

Contexts that do not fit into the pool together are asked about in turn, by three requests that take any KV and one that
takes exact KV only, at once. Stock SGLang answers every question first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server, greedy
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary

NUM_ANSWERS = 100
TOLERANCE = 5e-4  # difference of a log probability in fp32, by the shapes of batches
NUM_TOKENS = 8
POOL_SLOTS = 3_000
CONTEXT_TOKENS = (400, 700)
FAMILIES = ("needle", "mixed", "mapping", "redundant")
NUM_CONTEXTS = 12
NUM_OTHERS = 3
EXACT = {"kv_quality": "exact"}

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, their log probabilities, and the tokens of the prompt that came from exact and from lossy KV."""

    tokens: Ids
    logprobs: tuple[float, ...]
    served: Mapping[str, int]
    num_cached: int

    def differs(self, other: Answer) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens != other.tokens or any(abs(one - two) > TOLERANCE for one, two in pairs)


@dataclass(slots=True)
class Findings:
    """``num_met``: exact requests whose prefix was known and lossy, ``num_reused``: that took exact KV from the cache.
    Of the other requests ``num_lossy`` took lossy KV, and ``num_changed`` of their answers differ from stock's.
    ``problems``: exact answers that are not stock's, and counts that do not add up."""

    num_exact: int = 0
    num_met: int = 0
    num_reused: int = 0
    num_lossy: int = 0
    num_changed: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, right: Answer, answer: Answer, *, is_exact: bool) -> None:
        exact, lossy = answer.served["exact_tokens"], answer.served["lossy_tokens"]
        if exact + lossy != answer.num_cached:
            self.problems.append(f"{exact} exact and {lossy} lossy tokens of {answer.num_cached} cached ones")
        if not is_exact:
            self.num_lossy += lossy > 0
            self.num_changed += lossy > 0 and answer.differs(right)
            return
        self.num_exact += 1
        self.num_reused += exact > 0
        if lossy:
            self.problems.append(f"an exact request was served {lossy} lossy tokens")
        if answer.differs(right):
            self.problems.append(f"an exact request was answered {answer.tokens}: expected {right.tokens}")


def make_prompts(seed: int = 0) -> list[list[Ids]]:
    """The questions about each context."""
    rng, vocabulary = random.Random(f"exact-requests-{seed}"), load_vocabulary()
    contexts = [
        make_context(FAMILIES[number % len(FAMILIES)], rng.randint(*CONTEXT_TOKENS), rng)
        for number in range(NUM_CONTEXTS)
    ]
    return [[tuple(vocabulary.encode(each.prompt(one.text))) for one in each.questions] for each in contexts]


def ask(server: Server, prompt: Ids, custom_params: Mapping[str, str] | None = None) -> Answer:
    """One greedy answer with its log probabilities."""
    body = greedy(prompt, NUM_TOKENS, return_logprob=True)
    if custom_params is not None:
        body["sampling_params"]["custom_params"] = custom_params
    answer: Any = server.post("/generate", body)
    info = answer["meta_info"]
    logprobs = tuple(logprob for logprob, *_ in info["output_token_logprobs"])
    return Answer(tuple(answer["output_ids"]), logprobs, info.get("kv_cache", {}), info["cached_tokens"])


def answer_all(prompts: Sequence[Sequence[Ids]]) -> dict[Ids, Answer]:
    """The answers of stock SGLang."""
    with Server() as server:
        return {prompt: ask(server, prompt) for each in prompts for prompt in each}


def server_arguments() -> tuple[str, ...]:
    """A pool for half of the contexts, no tier below, and an alpha that compresses for that."""
    policy = ("--kv-policy", "evicpress", *GUESSED, "--kv-alpha", "0.05")
    return (*policy, "--max-total-tokens", str(POOL_SLOTS))


def play(server: Server, prompts: Sequence[Sequence[Ids]], right: Mapping[Ids, Answer], num_answers: int) -> Findings:
    """So many exact requests under pressure."""
    rng, findings = random.Random("exact-requests-play"), Findings()
    with ThreadPoolExecutor(1 + NUM_OTHERS) as pool:
        for _ in range(num_answers):
            before = _asked_exact(server)
            chosen = [rng.choice(rng.choice(prompts)) for _ in range(1 + NUM_OTHERS)]
            given = [EXACT, *[None] * NUM_OTHERS]
            answers = list(pool.map(lambda prompt, params: ask(server, prompt, params), chosen, given))
            for prompt, params, answer in zip(chosen, given, answers, strict=True):
                findings.add(right[prompt], answer, is_exact=params is not None)
            findings.num_met += _asked_exact(server) > before
    findings.problems += server.post("/evicpress/check")["violations"]
    return findings


def _asked_exact(server: Server) -> int:
    """Tokens that were computed because the KV that was there is lossy."""
    computed: dict[str, int] = server.get("/evicpress/stats")["admission"]["computed_tokens"]
    return computed.get("asked_exact", 0)


def measure_exact_requests(num_answers: int = NUM_ANSWERS) -> Iterator[Line]:
    prompts = make_prompts()
    right = answer_all(prompts)
    with Server(*server_arguments()) as server:
        found = play(server, prompts, right, num_answers)
    figure = (
        f"{found.num_exact} answers, {len(found.problems)} problems; {found.num_met} met lossy KV, {found.num_reused} "
        f"took exact KV; of the others {found.num_lossy} took lossy KV, which changed {found.num_changed}"
    )
    yield Line(
        'kv_quality: "exact" under pressure, beside requests that take any KV',
        f"{num_answers} answers equal stock SGLang's (log probabilities within {TOLERANCE:.0e}), some met lossy KV; "
        "lossy KV changes some of the others' answers",
        figure + (f"; first problem: {found.problems[0]}" if found.problems else ""),
        found.num_exact == num_answers and not found.problems and found.num_met > 0 and found.num_changed > 0,
    )
