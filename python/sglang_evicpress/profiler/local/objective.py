"""Objective of a search: how well questions are answered over survivors in the numbers that budgets give.

Contexts are compressed once, without their questions, as a shared prefix is; questions follow over the survivors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sglang_evicpress.press import Press, scored
from sglang_evicpress.press.layers import SAFEGUARD, select_across_heads, select_by_layer
from sglang_evicpress.profiler.engine import Answer, Likelihood
from sglang_evicpress.profiler.local.model import ContextKV, Survivors
from sglang_evicpress.profiler.measure import Asked
from sglang_evicpress.profiler.scorers import SCORERS, Scorer, get_scorer
from sglang_evicpress.profiler.scorers.reference import MEASURES
from sglang_evicpress.search.layer_budgets import Budgets

TASK = "task-"
OBJECTIVES = (*(f"{TASK}{name}" for name in MEASURES), *SCORERS)
"""``task-`` measures compare with the expected answer, the profiler's scorers with the answer over exact KV."""

SINKS = 4

Select = Callable[[Tensor, Budgets], Survivors]
"""From a press's scores [layers, kv_heads, n] and tokens to keep by layer to what attention sees."""


class Model(Protocol):
    """Model that answers over survivors; ``model.LocalModel`` is one."""

    def prefill(self, tokens: Sequence[Sequence[int]]) -> list[ContextKV]: ...

    def generate(
        self,
        contexts: Sequence[ContextKV],
        survivors: Sequence[Survivors],
        questions: Sequence[Sequence[Sequence[int]]],
        max_new_tokens: int,
    ) -> list[list[Answer]]: ...

    def score(
        self,
        contexts: Sequence[ContextKV],
        survivors: Sequence[Survivors],
        questions: Sequence[Sequence[Sequence[int]]],
        answers: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[Likelihood]]: ...


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Measure of the answer against the expected one, whatever exact KV would have answered: the task's own f."""

    name: str
    needs_generation: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    def prepare(self, texts: Sequence[str]) -> None:
        """Nothing."""

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        if given is None or reference is None:
            raise ValueError(f"objective {self.name} has no answer or no expected one: expected both")
        return MEASURES[self.name.removeprefix(TASK)](given.text, reference)


def get_objective(name: str) -> Scorer:
    """Raises ValueError for an unknown name, and as ``get_scorer``."""
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r:.100} is unknown: expected one of {', '.join(OBJECTIVES)}")
    return TaskScore(name) if name.startswith(TASK) else get_scorer(name)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One context with its questions: exact KV, the scores of a press, and the answers over exact KV."""

    context: ContextKV
    scores: Tensor
    asked: Sequence[Asked]
    exact: Sequence[Answer]

    @property
    def questions(self) -> list[Sequence[int]]:
        return [each.tokens for each in self.asked]


def even_heads(scores: Tensor, budgets: Budgets) -> Survivors:
    """As many in every head of a layer; all of a context that has fewer."""
    num_tokens = scores.shape[-1]
    return Survivors([each.long() for each in select_by_layer(scores, [min(k, num_tokens) for k in budgets])])


def adaptive_heads(scores: Tensor, budgets: Budgets, safeguard: float = SAFEGUARD) -> Survivors:
    """In each layer as many slots as ``even_heads``, shared by the scores of its heads (Ada-KV)."""
    pairs = zip(scores, budgets, strict=True)
    return survivors_of(select_across_heads(layer, min(budget, layer.shape[-1]), safeguard) for layer, budget in pairs)


def survivors_of(masks: Iterable[Tensor]) -> Survivors:
    """Of one mask a layer, bool [kv_heads, n]; its heads may keep different numbers."""
    indices, is_kept = list[Tensor](), list[Tensor]()
    for keep in masks:
        counts = keep.sum(-1)
        widest = int(counts.max())
        order = keep.int().argsort(dim=-1, descending=True, stable=True)[:, :widest]  # kept ones first, ascending
        indices.append(order)
        is_kept.append(torch.arange(widest, device=counts.device) < counts[:, None])
    return Survivors(indices, is_kept)


def prepare(
    model: Model,
    press: Press,
    contexts: Iterable[tuple[Sequence[int], Sequence[Asked]]],
    max_new_tokens: int,
    *,
    sinks: int = SINKS,
    batch: int = 1,
) -> Iterator[Task]:
    """Prefill contexts and answer their questions over exact KV; up to ``batch`` neighbours of one length share a
    pass."""
    for group in _of_one_length(contexts, batch):
        kvs = model.prefill([tokens for tokens, _ in group])
        scores = [scored(press, kv.node, sinks) for kv in kvs]
        questions = [[each.tokens for each in asked] for _, asked in group]
        exact = model.generate(kvs, [_everything(kv) for kv in kvs], questions, max_new_tokens)
        for kv, score, (_, asked), answers in zip(kvs, scores, group, exact, strict=True):
            yield Task(kv, score, asked, answers)


@dataclass(frozen=True, slots=True)
class Objective:
    """f of EvolKV's equation 1 on these tasks: the mean score of all their questions. ``batch``: contexts in a pass."""

    model: Model
    tasks: Sequence[Task]
    scorer: Scorer
    max_new_tokens: int
    select: Select = even_heads
    batch: int = 1

    def __call__(self, budgets: Budgets) -> float:
        scores = [score for task in self.by_question(budgets) for score in task]
        return sum(scores) / len(scores)

    @property
    def exact(self) -> float | None:
        """Mean score of the answers over exact KV; None for a scorer that compares with those."""
        if not isinstance(self.scorer, TaskScore):
            return None
        scores = [
            self.scorer.score(answer, answer, None, each.reference)
            for task in self.tasks
            for answer, each in zip(task.exact, task.asked, strict=True)
        ]
        return sum(scores) / len(scores)

    def by_question(self, budgets: Budgets) -> list[list[float]]:
        """Score of every question, by task."""
        found = list[list[float]]()
        for begin in range(0, len(self.tasks), self.batch):
            found += self._scores(self.tasks[begin : begin + self.batch], budgets)
        return found

    def _scores(self, tasks: Sequence[Task], budgets: Budgets) -> list[list[float]]:
        survivors = [self.select(task.scores, budgets) for task in tasks]
        contexts, questions = [task.context for task in tasks], [task.questions for task in tasks]
        if not self.scorer.needs_generation:
            exact = [[each.token_ids for each in task.exact] for task in tasks]
            likelihoods = self.model.score(contexts, survivors, questions, exact)
            return [
                [
                    self.scorer.score(best, None, likelihood, each.reference)
                    for best, likelihood, each in zip(task.exact, row, task.asked, strict=True)
                ]
                for task, row in zip(tasks, likelihoods, strict=True)
            ]
        answers = self.model.generate(contexts, survivors, questions, self.max_new_tokens)
        self.scorer.prepare([each.text for row in (*answers, *(task.exact for task in tasks)) for each in row])
        return [
            [
                self.scorer.score(best, given, None, each.reference)
                for best, given, each in zip(task.exact, row, task.asked, strict=True)
            ]
            for task, row in zip(tasks, answers, strict=True)
        ]


def _everything(context: ContextKV) -> Survivors:
    layers, num_tokens, heads, _ = context.keys.shape
    return Survivors([torch.arange(num_tokens).expand(heads, -1)] * layers)


def _of_one_length(
    contexts: Iterable[tuple[Sequence[int], Sequence[Asked]]], batch: int
) -> Iterator[list[tuple[Sequence[int], Sequence[Asked]]]]:
    group = list[tuple[Sequence[int], Sequence[Asked]]]()
    for each in contexts:
        if group and (len(group) == batch or len(group[0][0]) != len(each[0])):
            yield group
            group = []
        group.append(each)
    if group:
        yield group
