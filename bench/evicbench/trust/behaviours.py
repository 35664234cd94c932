"""SGLang's behaviours with our cache, serving exact KV only, beside a stock server that is asked the same."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from evicbench.correctness.reference import changed_model
from evicbench.correctness.stock import TIE, WITHOUT_PLUGIN
from evicbench.policy.exact_requests import TOLERANCE
from evicbench.report import Line
from evicbench.stress import CHECKS, FAILURES
from evicbench.testbed.server import MODEL, Server
from evicbench.tiers.inputs import scratch
from evicbench.trust import scenarios
from evicbench.trust.lora import make_adapter, unpinned
from evicbench.trust.scenarios import Given, Played, Scenario

SEED = 0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """A scenario and what must have happened in it on either server: counts above 0, and counts that are 0."""

    play: Scenario
    happened: Sequence[str] = ()
    never: Sequence[str] = ()


@dataclass(slots=True)
class Outcome:
    """Answers of one server in one scenario. ``moves``: nodes dropped and demoted meanwhile. ``problems``: of its cache
    afterwards, or the words with which it refused."""

    played: Played = field(default_factory=Played)
    moves: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


BEHAVIOURS = {
    "chunked prefill": Behaviour(scenarios.chunked_prefill, ("prompts of several chunks",)),
    "abort storm": Behaviour(scenarios.abort_storm, ("aborted",)),
    "retraction": Behaviour(scenarios.retraction, ("retractions",)),
    "sessions": Behaviour(scenarios.sessions, ("sessions", "branches")),
    "logprobs": Behaviour(scenarios.logprobs, ("of tokens of prompts",)),
    "n > 1": Behaviour(scenarios.several_answers, ("answers", "sampled"), ("unlike each other",)),
    "constrained decoding, outlines": Behaviour(scenarios.constrained, ("matching",), ("not matching",)),
    "flush": Behaviour(scenarios.flush, ("flushes", "refused", "answered"), ("cached after a flush",)),
    "pause": Behaviour(
        scenarios.pause,
        ("paused, in_place", "paused, retract", "aborted"),
        ("went on while paused, in_place", "went on while paused, retract"),
    ),
}

FLAGS = (
    *("--random-seed", "7", "--max-total-tokens", str(scenarios.POOL_SLOTS), "--grammar-backend", "outlines"),
    *("--max-running-requests", str(scenarios.NUM_RUNNING), "--chunked-prefill-size", str(scenarios.CHUNK_TOKENS)),
    *("--schedule-conservativeness", "0.1"),  # takes in more than it can hold: requests are retracted
)


def exact(folder: Path) -> tuple[str, ...]:
    """Flags of exact mode: nothing may be compressed, so that what leaves the GPU moves down or is dropped."""
    return (
        *("--kv-policy", "evicpress", "--kv-quality", "1", "--kv-host-gb", "0.016"),
        *("--kv-ssd-dir", str(folder), "--kv-ssd-gb", "0.064"),
    )


def shake(weights: dict[str, torch.Tensor]) -> None:
    """Every weight is off by a tenth or so."""
    generator = torch.Generator().manual_seed(SEED)
    for weight in weights.values():
        weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))


def play(server: Server, behaviours: Mapping[str, Behaviour], *, is_ours: bool) -> dict[str, Outcome]:
    """Every scenario, on the cache that the ones before left."""
    outcomes = {}
    for name, behaviour in behaviours.items():
        before, outcome = _moves(server) if is_ours else Counter[str](), Outcome()
        try:
            outcome.played = behaviour.play(server, random.Random(f"{SEED}-{name}"))
        except FAILURES as error:
            outcome.problems.append(f"{type(error).__name__}: {str(error)[:300]}")
        if is_ours:
            with suppress(*FAILURES):
                outcome.moves = _moves(server) - before
                outcome.problems += server.post("/evicpress/check")["violations"]
        outcomes[name] = outcome
        print(
            f"    {'ours' if is_ours else 'stock'}, {name}: {len(outcome.played.given)} answers, "
            f"{dict(outcome.played.counts)}, {dict(outcome.moves)}, {outcome.problems[:2]}",
            flush=True,
        )
    return outcomes


def _moves(server: Server) -> Counter[str]:
    decisions = server.get("/evicpress/stats")["decisions"]
    return Counter({"dropped": decisions["dropped"], "demoted": sum(decisions["demoted"].values())})


def differences(ours: Sequence[Given], stock: Sequence[Given]) -> tuple[int, list[str]]:
    """Number of answers that part at a tie, and in words those that part where one token clearly led, or whose log
    probabilities before that differ by more than rounding does."""
    num_ties, wrong = 0, []
    if len(ours) != len(stock):
        return 0, [f"{len(ours)} answers, {len(stock)} of stock"]
    for number, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        pairs = list(zip(mine.tokens, theirs.tokens, strict=False))
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        if same < len(pairs):
            lead = min(mine.leads[same], theirs.leads[same])
            num_ties += lead < TIE
            if lead >= TIE:
                wrong.append(
                    f"answer {number}: token {same} is {pairs[same][0]}, stock's {pairs[same][1]} led by {lead:.1e}"
                )
        elif len(mine.tokens) != len(theirs.tokens):
            wrong.append(f"answer {number}: {len(mine.tokens)} tokens, {len(theirs.tokens)} of stock")
        probabilities = [*zip(mine.logprobs[:same], theirs.logprobs[:same], strict=False)]
        if len(mine.of_prompt) != len(theirs.of_prompt):
            wrong.append(
                f"answer {number}: {len(mine.of_prompt)} tokens of the prompt, {len(theirs.of_prompt)} of stock"
            )
        probabilities += zip(mine.of_prompt, theirs.of_prompt, strict=False)
        if (most := max((abs(one - other) for one, other in probabilities), default=0.0)) > TOLERANCE:
            wrong.append(f"answer {number}: a log probability is {most:.1e} off")
    return num_ties, wrong


def line(name: str, behaviour: Behaviour, ours: Outcome, stock: Outcome) -> Line:
    num_ties, wrong = differences(ours.played.given, stock.played.given)
    missing = [
        f"{whose}: {count} {'never' if not each.played.counts[count] else each.played.counts[count]}"
        for whose, each in (("ours", ours), ("stock", stock))
        for count in (*behaviour.happened, *behaviour.never)
        if bool(each.played.counts[count]) != (count in behaviour.happened)
    ]
    problems = [*ours.problems, *(f"stock: {each}" for each in stock.problems), *missing, *wrong]
    came = [ours.played.sources[place] for place in ("device", "host", "storage")]
    counts = {name: count for name, count in ours.played.counts.items() if count}
    return Line(
        f"SGLang's behaviours, exact mode beside stock: {name}",
        f"answers equal but for ties below {TIE:g}, log probabilities within {TOLERANCE:g}; nodes moved and loaded",
        f"{len(ours.played.given)} answers, {len(wrong)} unlike, {num_ties} part at a tie; {counts}; "
        f"{dict(ours.moves)}; tokens from GPU, host, SSD {'/'.join(map(str, came))}"
        + (f"; {len(problems)} problems, first: {problems[0]}" if problems else ""),
        not problems and bool(ours.played.given) and came[1] > 0 and ours.moves["demoted"] > 0,
    )


def pair(behaviours: Mapping[str, Behaviour], *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Line]:
    """A stock server, then ours with the same flags. ``env`` adds to the environment of both."""
    with Server(*FLAGS, *flags, env={**WITHOUT_PLUGIN, **(env or {})}) as server:
        stock = play(server, behaviours, is_ours=False)
    with scratch(1 << 28) as folder, Server(*FLAGS, *flags, *exact(folder), env={**CHECKS, **(env or {})}) as server:
        ours = play(server, behaviours, is_ours=True)
    for name, behaviour in behaviours.items():
        yield line(name, behaviour, ours[name], stock[name])


def measure() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as made:
        other = changed_model(MODEL, Path(made) / "other", shake)
        updates = Behaviour(scenarios.weight_updates(other, MODEL), ("updates", "answers that changed"))
        yield from pair({**BEHAVIOURS, "weight updates": updates})
        one, two = (make_adapter(Path(made) / name, MODEL, seed) for seed, name in enumerate(("one", "two")))
        flags = ("--enable-lora", "--lora-paths", f"one={one}", f"two={two}", "--lora-backend", "torch_native")
        with_adapters = Behaviour(scenarios.adapters, ("answered otherwise by adapters",))
        name = "LoRA, two adapters, no memory pinned"
        yield from pair({name: with_adapters}, *flags, env=unpinned(Path(made) / "site"))
