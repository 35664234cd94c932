"""Random prompts that share beginnings, and what a server without any cache answers to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from evicbench.correctness.reference import PEAKY_VOCABULARY
from evicbench.testbed.server import Server

SURE = 2e-3
"""A log probability: by so much the first token leads the second at every step of an answer that is compared. Where a
prefill is cut, and so the last bits of every sum, depends on what was cached."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the right answer to it."""

    prompt: Ids
    answer: Ids


@dataclass(slots=True)
class _Part:
    tokens: Ids
    next_parts: list[_Part] = field(default_factory=list)


class Texts:
    """A forest of random texts: prompts are drawn as a walk from a root, cut anywhere, and a few tokens of their own.

    ``num_roots`` texts, every part of which is continued in up to two ways.
    """

    def __init__(self, rng: random.Random, num_roots: int) -> None:
        self._rng = rng
        self._roots = [_Part(self.noise(rng.randint(80, 700))) for _ in range(num_roots)]

    def noise(self, num_tokens: int) -> Ids:
        return tuple(self._rng.randrange(3, PEAKY_VOCABULARY) for _ in range(num_tokens))

    def prompt(self, shortest: int = 64, longest: int = 1500) -> Ids:
        rng = self._rng
        size = rng.randint(shortest, longest) - 4
        part = rng.choice(self._roots)
        tokens = part.tokens
        while len(tokens) < size:
            if len(part.next_parts) < 2:
                part.next_parts.append(_Part(self.noise(rng.randint(40, 500))))
            part = rng.choice(part.next_parts)
            tokens += part.tokens
        return tokens[:size] + self.noise(rng.randint(1, 4))


def reference(model: Path) -> Server:
    """A server that caches nothing and knows nothing of the plugin."""
    flags = ("--disable-radix-cache", "--max-total-tokens", "16384", "--skip-tokenizer-init")
    return Server(*flags, model=model, env={"SGLANG_PLUGINS": "none"})


def answered(server: Server, prompts: Sequence[Ids], num_tokens: Sequence[int]) -> list[Question]:
    """The prompts with the server's greedy answers, in order, but for those where an answer is not sure."""
    with ThreadPoolExecutor(3) as clients:
        found = clients.map(lambda prompt, count: _answered(server, prompt, count), prompts, num_tokens)
        return [question for question in found if question is not None]


def _answered(server: Server, prompt: Ids, num_tokens: int) -> Question | None:
    given = server.generate(list(prompt), num_tokens, return_logprob=True, top_logprobs_num=2)
    leads = [first[0] - second[0] for first, second in given["meta_info"]["output_top_logprobs"]]
    return Question(prompt, tuple(given["output_ids"])) if min(leads) > SURE else None


def num_changed(server: Server, questions: Sequence[Question], rng: random.Random) -> int:
    """Number of answers that change with one token in the first half of the prompt: a wrong cache would be seen."""
    count = 0
    for question in questions:
        place = rng.randrange(len(question.prompt) // 2)
        changed = list(question.prompt)
        changed[place] = 3 + (changed[place] - 2) % (PEAKY_VOCABULARY - 3)
        count += tuple(server.generate(changed, len(question.answer))["output_ids"]) != question.answer
    return count
