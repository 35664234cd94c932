"""A serving workload over many shared contexts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from evicbench.testbed.tasks import FAMILIES, make_context
from evicbench.testbed.vocabulary import ASK, BOS


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a question about a context that other turns share."""

    context_id: int
    family: str
    context: str
    question: str
    answer: str

    @property
    def content(self) -> str:
        return f"{self.context} {ASK} {self.question}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """For /v1/chat/completions; the chat template writes `<bos>` before the content."""
        return [{"role": "user", "content": self.content}]

    @property
    def prompt(self) -> str:
        """For /v1/completions and /generate; the same tokens as `messages` under the chat template."""
        return f"{BOS} {self.content}"


def _turns_per_context(num_turns: int, num_contexts: int, zipf: float) -> list[int]:
    """Split the turns by popularity rank**-zipf, at least one each, rounding by largest remainder."""
    weights = [rank**-zipf for rank in range(1, num_contexts + 1)]
    spare = num_turns - num_contexts
    shares = [spare * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(num_contexts), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: spare - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]


def make_workload(
    num_contexts: int,
    questions_per_context: int,
    context_tokens: int,
    seed: int,
    *,
    families: Sequence[str] | None = None,
    zipf: float = 1.0,
) -> list[Turn]:
    """`num_contexts * questions_per_context` turns in a random order, the same for the same arguments.

    Families take turns over the contexts. Every context is asked about at least once; how much more often a
    popular one comes back follows rank**-zipf, and `zipf=0` gives each `questions_per_context` turns. A
    context that is asked more often than it has questions starts over with its first. Raises ValueError for
    counts below one, a negative zipf or an unknown family.
    """
    if num_contexts < 1 or questions_per_context < 1:
        raise ValueError("a workload needs at least one context and one question per context")
    if zipf < 0:
        raise ValueError(f"zipf is a popularity exponent of at least 0, not {zipf}")
    chosen = tuple(families or FAMILIES)
    rng = random.Random(f"workload-{seed}")
    counts = _turns_per_context(num_contexts * questions_per_context, num_contexts, zipf)
    rng.shuffle(counts)  # so that popularity says nothing about the family
    turns: list[Turn] = []
    for context_id, count in enumerate(counts):
        context = make_context(chosen[context_id % len(chosen)], context_tokens, rng)
        for i in range(count):
            question = context.questions[i % len(context.questions)]
            turns.append(Turn(context_id, context.family, context.text, question.text, question.answer))
    rng.shuffle(turns)
    return turns
