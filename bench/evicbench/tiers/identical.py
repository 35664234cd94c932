"""Answers of a server whose KV has gone to host memory and SSD and back, against one that caches nothing."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evicbench.correctness.reference import make_peaky_model
from evicbench.moves import nodes_of, push_down, sources
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Question, Texts, answered, num_changed, reference

NUM_REQUESTS = 200
NUM_LOSSY = 120
NUM_CONTROLS = 30
CHECK_EVERY = 20
POOL_SLOTS = 4096
WAYS = ("nothing", "flush gpu", "flush host", "host", "all to host", "ssd", "all to ssd", "ssd", "all to ssd")
LEAST_SHARE = 0.1
"""Of all requests: at least so many must have got KV from the host, and so many from the SSD."""


def arguments(folder: Path, page_size: int, *more: str) -> tuple[str, ...]:
    """A pool of two or three prompts, host memory for twice as many tokens, and an SSD for the rest."""
    return (
        *("--kv-policy", "evicpress", *GUESSED, "--page-size", str(page_size), "--max-total-tokens", str(POOL_SLOTS)),
        *("--max-running-requests", "4", "--chunked-prefill-size", "512", "--skip-tokenizer-init"),
        *("--kv-host-gb", "0.016", "--kv-ssd-dir", str(folder), "--kv-ssd-gb", "0.3", *more),
    )


@dataclass(slots=True)
class Outcome:
    """``tokens``: loaded, by where they came from; ``requests``: how many got any from there."""

    num_requests: int = 0
    num_tokens: int = 0
    num_checks: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def has_moved(self) -> bool:
        """True if KV really went down and came back."""
        is_often = all(self.requests[place] >= LEAST_SHARE * self.num_requests for place in ("host", "storage"))
        return is_often and all(self.counts.get(name, 0) > 0 for name in ("backed_up", "written", "read", "loads"))

    def take(self, question: Question, answer: Any, is_exact: bool) -> None:
        self.num_requests += 1
        self.num_tokens += len(question.answer)
        found = sources(answer)
        self.tokens.update(found)
        self.requests.update(place for place, count in found.items() if count)
        ids = tuple(answer["output_ids"])
        if len(ids) != len(question.answer) or (is_exact and ids != question.answer):
            came_from = f"prompt of {len(question.prompt)} tokens, {found}"
            self.problems.append(f"request {self.num_requests} ({came_from}): {ids}, expected {question.answer}")

    def check(self, server: Server) -> None:
        self.num_checks += 1
        found = server.post("/evicpress/check")
        if not found["ok"]:
            self.problems.append(f"check after {self.num_requests} requests: {found['violations']}")

    @property
    def moves(self) -> str:
        names = ("backed_up", "written", "read", "loads", "late_layers")
        return ", ".join(f"{name} {self.counts.get(name, 0)}" for name in names) + (
            f"; first: {self.problems[0][:300]}" if self.problems else ""
        )


def draw_questions(model: Path, num_requests: int, seed: int) -> tuple[list[Question], int, int]:
    """Prompts with their right answers; how many of the last numbers' prompts, changed in one token, are answered
    otherwise, and that number."""
    rng = random.Random(f"identical-{seed}")
    texts = Texts(rng, num_roots=max(4, num_requests // 12))
    prompts = [texts.prompt() for _ in range(num_requests + num_requests // 5)]
    with reference(model) as server:
        questions = answered(server, prompts, [rng.randint(8, 16) for _ in prompts])[:num_requests]
        controls = questions[: min(NUM_CONTROLS, num_requests // 4)]
        return questions, num_changed(server, controls, rng), len(controls)


def ask_all(server: Server, questions: Sequence[Question], seed: int, *, is_exact: bool = True) -> Outcome:
    """Ask in groups of one to three at a time; before every group some nodes are moved down, by every way there is:
    all of ``WAYS`` in a random order, then again."""
    rng, outcome, left = random.Random(f"moves-{seed}"), Outcome(), list(questions)
    ways: list[str] = []
    with ThreadPoolExecutor(3) as clients:
        while left:
            group, left = left[: (size := rng.randint(1, 3))], left[size:]
            ways = ways or rng.sample(WAYS, len(WAYS))
            _move_down(server, ways.pop(), rng)
            given = clients.map(lambda one: server.generate(list(one.prompt), len(one.answer)), group)
            for question, answer in zip(group, given, strict=True):
                outcome.take(question, answer, is_exact)
            if outcome.num_requests // CHECK_EVERY > outcome.num_checks:
                outcome.check(server)
    outcome.check(server)
    outcome.counts = server.get("/evicpress/tiers")["counts"]
    return outcome


def _move_down(server: Server, way: str, rng: random.Random) -> None:
    if way.startswith("flush"):
        server.post(f"/evicpress/flush?tier={way[6:]}")
    elif way.startswith("all to"):
        push_down(server, way[7:])
    elif way != "nothing":
        nodes = [node["id"] for node in nodes_of(server)]
        chosen = set(rng.sample(nodes, len(nodes) // 3))
        push_down(server, way, lambda node: node["id"] in chosen)


def exact_line(outcome: Outcome, num_seen: int, num_controls: int) -> Line:
    wrong = len(outcome.problems)
    return Line(
        f"{outcome.num_requests} random requests, KV going to host and SSD and back, against a server without cache",
        f"every token equal; host and SSD hits in {LEAST_SHARE:.0%} of them each; "
        "a change of one cached token shows in most answers",
        f"{outcome.num_tokens} tokens, {wrong} problems; KV from GPU, host, SSD in {_places(outcome.requests)} "
        f"requests ({_places(outcome.tokens)} tokens); changes seen: {num_seen} of {num_controls}; {outcome.moves}",
        not wrong and outcome.has_moved and num_seen > num_controls // 2,
    )


def lossy_line(outcome: Outcome) -> Line:
    return Line(
        f"{outcome.num_requests} such requests with the default, compressing forms, pages of 16",
        f"the cache is whole after every {CHECK_EVERY} requests, every answer complete",
        f"{outcome.num_checks} checks, {len(outcome.problems)} problems; KV from GPU, host, SSD in "
        f"{_places(outcome.requests)} requests; {outcome.moves}",
        not outcome.problems and outcome.requests["host"] > 0 and outcome.requests["storage"] > 0,
    )


def _places(counts: Counter[str]) -> str:
    return "/".join(str(counts[place]) for place in ("device", "host", "storage"))


def measure(num_requests: int = NUM_REQUESTS, num_lossy: int = NUM_LOSSY, seed: int = 0) -> Iterator[Line]:
    with scratch(1 << 30) as folder, tempfile.TemporaryDirectory() as models:
        model = make_peaky_model(Path(models) / "peaky")
        questions, num_seen, num_controls = draw_questions(model, num_requests, seed)
        exact = arguments(folder / "exact", 1, "--kv-forms", "exact")
        with Server(*exact, model=model) as server:
            yield exact_line(ask_all(server, questions, seed), num_seen, num_controls)
        with Server(*arguments(folder / "lossy", 16), model=model) as server:
            yield lossy_line(ask_all(server, questions[:num_lossy], seed, is_exact=False))
