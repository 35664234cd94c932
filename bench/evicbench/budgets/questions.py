"""Questions of our own making, and their scores over survivors of snapkv, without a server.

A context is compressed alone, as a shared prefix is, and its questions follow over what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from evicbench.testbed.contexts import generate
from evicbench.testbed.vocabulary import ASK, MODEL_DIR, load_vocabulary
from sglang_evicpress.press import get_press
from sglang_evicpress.profiler.local.model import LocalModel
from sglang_evicpress.profiler.local.objective import (
    Objective,
    Select,
    Task,
    even_heads,
    get_objective,
    prepare,
)
from sglang_evicpress.profiler.measure import Asked
from sglang_evicpress.search.layer_budgets import Budgets, uniform

EXACT = "exact KV"
PRESS = "snapkv"
OBJECTIVE = "task-f1"
MAX_NEW_TOKENS = 14
BATCH = 32
Scores = list[list[float]]
"""Of every question, by context."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Contexts of ``families``, which take turns, ``num_questions`` about each; the same for the same ``seed``."""

    num_contexts: int
    seed: int
    families: tuple[str, ...]
    num_tokens: int
    num_questions: int = 4

    def contexts(self) -> Iterator[tuple[list[int], list[Asked]]]:
        """Tokens of each context, and its questions with their answers."""
        vocabulary = load_vocabulary()
        drawn = generate(self.num_contexts, (self.num_tokens,), self.num_questions, self.seed, self.families)
        for context in drawn:
            asked = [Asked(vocabulary.encode(f"{ASK} {each.text}"), each.answer) for each in context.questions]
            yield [vocabulary.ids[word] for word in context.tokens], asked[: self.num_questions]


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens kept by layer, and their survivors."""

    budgets: Budgets
    select: Select = even_heads


@cache
def testbed() -> LocalModel:
    """The small trained model."""
    return LocalModel(MODEL_DIR)


def tasks_of(contexts: Iterator[tuple[list[int], list[Asked]]]) -> list[Task]:
    return list(prepare(testbed(), get_press(PRESS), contexts, MAX_NEW_TOKENS, batch=BATCH))


def objective_of(tasks: Sequence[Task], select: Select = even_heads) -> Objective:
    return Objective(testbed(), tasks, get_objective(OBJECTIVE), MAX_NEW_TOKENS, select, BATCH)


def evaluate(kept: Mapping[str, Kept], questions: Questions) -> dict[str, Scores]:
    """Scores of all that is kept, by name, and as ``EXACT`` those over exact KV. Contexts are forgotten one batch after
    the other."""
    whole = Kept(uniform(testbed().num_layers, questions.num_tokens))
    wanted = {EXACT: whole, **kept}
    scores = {name: Scores() for name in wanted}
    contexts = questions.contexts()
    while tasks := tasks_of(islice(contexts, BATCH)):
        for name, each in wanted.items():
            scores[name] += objective_of(tasks, each.select).by_question(each.budgets)
    return scores


def mean(scores: Scores) -> float:
    """Over all questions."""
    return sum(map(sum, scores)) / sum(map(len, scores))
