"""The contexts that the profiler's promises are measured on, with more questions about each than the testbed asks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary

NUM_TOKENS = 31 * 64
"""Whole blocks: all that is asked about lies in the part that is compressed."""

NUM_TRAINING = 30
"""As many as `evicpress profile` makes by default."""

NUM_HELD_OUT = 20
NUM_QUESTIONS = NUM_TRAINING + NUM_HELD_OUT
_COUNTS = {"multikv": 180, "hop": 52, "record": 62, "mapping": 25, "mixed": 12}
"""Facts (labels, chains, logs, rounds) in a context; in the others as many as questions. `needle`, `redundant` and
`mapping` have more of them than in the testbed, where 4 make too few questions."""


@dataclass(frozen=True, slots=True)
class StudyContext:
    """A context as the profiler gets it: its tokens and the tokens of each question behind them."""

    family: str
    tokens: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]


def make_study_context(family: str, number: int) -> StudyContext:
    """A context of ``NUM_TOKENS`` tokens with ``NUM_QUESTIONS`` different questions, or the one there is; the same for
    the same number."""
    draw = random.Random(f"profiler-{family}-{number}")
    context = make_context(family, NUM_TOKENS, draw, _COUNTS.get(family, NUM_QUESTIONS))
    encode = load_vocabulary().encode
    prompts = [tuple(encode(context.prompt(question.text))) for question in context.questions[:NUM_QUESTIONS]]
    return StudyContext(family, prompts[0][:NUM_TOKENS], tuple(prompt[NUM_TOKENS:] for prompt in prompts))
