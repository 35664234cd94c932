"""A floor of 0.9 in the OpenAI body under pressure: answers beside those over exact KV, usage beside the tree.

Contexts are profiled at the server by half of their questions. The other half is asked, each time once with a floor
and once without, in a pool for an eighth of the contexts above a host tier for half of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import NamedTuple

from evicbench.operator.tree_reader import TreeReader, Walked
from evicbench.report import Line
from evicbench.testbed.contexts import FEW_FACTS
from evicbench.testbed.server import ADMIN_KEY, Server
from evicbench.testbed.tasks import Context, Question, make_context
from evicbench.testbed.vocabulary import ASK, BOS, load_vocabulary
from sglang_evicpress.asked_quality import ServedKV
from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.measure import Asked, profile_context
from sglang_evicpress.profiler.scorers import get_scorer
from sglang_evicpress.profiler.scorers.reference import token_f1
from sglang_evicpress.profiler.transport import HttpTransport
from sglang_evicpress.quality.profile import BLOCK_TOKENS

FLOOR = 0.9
NUM_REQUESTS = 200
NUM_CONTEXTS = 36
FAMILIES = ("needle", "redundant", "mapping", "record", "hop", "mixed")
CONTEXT_TOKENS = (400, 700)
NUM_QUESTIONS = 12
ANSWER_TOKENS = 14
POOL_SLOTS = 2_600
SCORER = "f1"
FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2))
SERVER = (
    *("--kv-policy", "evicpress", "--kv-forms", ",".join(map(str, FORMS)), "--kv-disable-online-profiling"),
    *("--kv-alpha", "0.05", "--max-total-tokens", str(POOL_SLOTS), "--kv-host-gb", "0.016"),
)

Questions = Mapping[str, str]


@dataclass(slots=True)
class Served:
    """Requests with a floor, or without. ``f1``: of each answer beside that over exact KV; ``wrong``: what usage says,
    and the tree does not."""

    f1: list[float] = field(default_factory=list)
    f1_of_lossy: list[float] = field(default_factory=list)
    qualities: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    tiers: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def add(self, f1: float, usage: Mapping[str, object], walked: Walked) -> None:
        self.f1.append(f1)
        if walked.lossy_tokens:
            self.f1_of_lossy.append(f1)
        self.qualities.append(walked.quality)
        self.weights.append(walked.num_tokens)
        self.tiers |= set(walked.tiers)
        told = {name: usage[name] for name in ("exact_tokens", "lossy_tokens", "tiers")}
        if told != walked.as_usage():
            self.wrong.append(f"{told}, in the tree {walked.as_usage()}")

    @property
    def weighted(self) -> float:
        """Mean predicted quality of the tokens from the cache."""
        pairs = zip(self.qualities, self.weights, strict=True)
        return sum(quality * weight for quality, weight in pairs) / max(1, sum(self.weights))


def measure(num_requests: int = NUM_REQUESTS, num_contexts: int = NUM_CONTEXTS) -> Iterator[Line]:
    contexts = make_contexts(num_contexts)
    exact = answers_over_exact_kv(contexts)
    with Server(*SERVER) as server:
        _profile(server, contexts)
        with_floor, without = _play(server, contexts, exact, num_requests)
        checked = server.post("/evicpress/check")
    yield from _lines(with_floor, without, num_requests, checked["violations"])


def make_contexts(number: int, seed: int = 0) -> list[Context]:
    rng = random.Random(f"floor-{seed}")
    return [
        make_context(family, rng.randint(*CONTEXT_TOKENS), rng, NUM_QUESTIONS if family in FEW_FACTS else None)
        for family in (FAMILIES[index % len(FAMILIES)] for index in range(number))
    ]


def answers_over_exact_kv(contexts: Sequence[Context]) -> dict[str, str]:
    """Answers of stock SGLang by prompt, to the questions that are asked."""
    with Server() as server:
        return {prompt: _complete(server, prompt).text for context in contexts for prompt in _prompts(context)}


def _prompts(context: Context) -> list[str]:
    return [context.prompt(question.text) for question in _halves(context)[1]]


def _halves(context: Context) -> tuple[Sequence[Question], Sequence[Question]]:
    """Questions that the context is profiled by, and those that are asked."""
    questions = context.questions[:NUM_QUESTIONS]
    middle = len(questions) // 2
    return questions[:middle], questions[middle:]


class Answer(NamedTuple):
    """Text of an answer, and what its usage says of the KV that it was served from."""

    text: str
    kv_cache: ServedKV | None


def _complete(server: Server, prompt: str, **fields: object) -> Answer:
    body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS, **fields}
    answer = server.post("/v1/completions", body)
    return Answer(str(answer["choices"][0]["text"]), answer["usage"].get("kv_cache"))


def _profile(server: Server, contexts: Sequence[Context]) -> None:
    """Profile by the questions that are not asked; the server goes by it from then on."""
    engine = ServerEngine(HttpTransport(server.url, admin_api_key=ADMIN_KEY), fill_tokens=2048, may_evict=True)
    vocabulary, scorer = load_vocabulary(), get_scorer(SCORER)
    for context in contexts:
        tokens = vocabulary.encode(f"{BOS} {context.text}")
        end = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        asked = [
            Asked([*tokens[end:], *vocabulary.encode(f"{ASK} {question.text}")]) for question in _halves(context)[0]
        ]
        profile = profile_context(engine, tokens[:end], None, asked, FORMS, scorer, max_new_tokens=ANSWER_TOKENS)
        server.post("/evicpress/profiles", {"profile": profile.to_json(), "is_fresh": True})


def _play(
    server: Server, contexts: Sequence[Context], exact: Mapping[str, str], num_requests: int
) -> tuple[Served, Served]:
    rng, reader = random.Random("floor-play"), TreeReader(server)
    with_floor, without = Served(), Served()
    for _ in range(num_requests):
        for served, fields in ((without, {}), (with_floor, {"kv_quality": FLOOR})):
            prompt = rng.choice(_prompts(rng.choice(contexts)))
            prompt_ids, before = load_vocabulary().encode(prompt), reader.read_when_quiet()
            before.note_qualities(prompt_ids)
            answer = _complete(server, prompt, **fields)
            usage = answer.kv_cache
            if usage is None:
                raise RuntimeError(f"an answer has no usage.kv_cache: {answer.text!r:.100}")
            walked = before.walk(prompt_ids, usage["exact_tokens"] + usage["lossy_tokens"])
            served.add(token_f1(answer.text, exact[prompt]), usage, walked)
    return with_floor, without


def _lines(with_floor: Served, without: Served, num_requests: int, violations: Sequence[str]) -> Iterator[Line]:
    f1, lossy = mean(with_floor.f1), with_floor.f1_of_lossy
    of_lossy = mean(lossy) if lossy else 0.0
    others = f"without a floor {mean(without.f1):.3f}, {len(without.f1_of_lossy)} upon lossy KV"
    yield Line(
        f"kv_quality {FLOOR} in the OpenAI body under pressure: measured quality, F1 beside answers over exact KV",
        f">= {FLOOR} over {num_requests} requests, and over those served lossy KV, of which there are some",
        f"{f1:.3f} over {len(with_floor.f1)}; {of_lossy:.3f} over {len(lossy)} upon lossy KV; {others}",
        f1 >= FLOOR and len(lossy) >= num_requests // 20 and of_lossy >= FLOOR,
    )
    below = [quality for quality in with_floor.qualities if quality < FLOOR - 1e-6]
    num_others = sum(quality < FLOOR for quality in without.qualities)
    yield Line(
        "the same requests: predicted quality of what each was served, mean by its tokens, read from the tree",
        f"none below {FLOOR}; some without a floor are",
        f"{len(below)} of {num_requests} below, least {min(with_floor.qualities):.3f}, all of them together "
        f"{with_floor.weighted:.3f}; without a floor {num_others} of {num_requests}, together {without.weighted:.3f}",
        not below and num_others > 0,
    )
    wrong = [*with_floor.wrong, *without.wrong]
    yield Line(
        "usage.kv_cache of all these beside the tree read just before: exact and lossy tokens, tiers",
        "equal, over more than one tier",
        f"{2 * num_requests - len(wrong)} of {2 * num_requests} equal, tiers {', '.join(sorted(with_floor.tiers))}; "
        f"invariants broken: {len(violations)}{'; first difference: ' + wrong[0] if wrong else ''}",
        not wrong and not violations and len(with_floor.tiers) > 1,
    )
