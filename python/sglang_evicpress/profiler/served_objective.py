"""Objective of a search at a running server: questions about shadows of contexts, kept by layer as budgets say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.engine import Answer, EngineError, Shadow, ShadowLost, ShadowRefused
from sglang_evicpress.profiler.local.objective import TaskScore
from sglang_evicpress.profiler.measure import Asked, answer, qualities_of
from sglang_evicpress.profiler.scorers import Scorer
from sglang_evicpress.profiler.transport import Transport
from sglang_evicpress.search.layer_budgets import Budgets

BUDGET = "searched"
"""Name of the budget of a candidate's form, whose tokens are given by layer."""

MAX_ATTEMPTS, PAUSE_S = 3, 0.5
"""For one context, and seconds between them: its shadow goes, and what is asked of it ends, when users need room."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedTask:
    """One context, whole blocks of tokens, with its questions and the answers over exact KV."""

    tokens: Sequence[int]
    namespace: str | None
    asked: Sequence[Asked]
    exact: Sequence[Answer]


def layers_of(transport: Transport, page_size: int) -> tuple[int, int]:
    """Layers of the server's model, and the first tokens that each of them keeps always. Raises EngineError, one
    sentence, where it cannot keep another number of tokens in each of them: with pages of several slots not those that
    are asked for, but whole pages."""
    if page_size > 1:
        raise EngineError(
            f"layers of the server keep whole pages of {page_size} slots, other budgets than are searched: expected "
            "one started with --page-size 1"
        )
    stats = transport.ask("GET", "/evicpress/stats")
    groups, sinks = stats.get("layer_groups"), stats.get("sinks")
    if not isinstance(groups, list) or not groups:
        raise EngineError(
            f"GET /evicpress/stats answered {groups!r:.60} as layer_groups: expected a server whose --kv-forms have "
            "layer budgets, such as snapkv@0.3:pyramid"
        )
    if len(set(groups)) < len(groups):
        raise EngineError(
            f"the server keeps {len(set(groups))} different numbers of tokens in its {len(groups)} layers: expected "
            f"one started with --kv-forms PRESS@KEPT:pyramid and --kv-max-layer-counts {len(groups)}"
        )
    if not isinstance(sinks, int):
        raise EngineError(f"GET /evicpress/stats answered {sinks!r:.60} as sinks: expected a server of this version")
    return len(groups), sinks


def prepare_served(
    engine: ServerEngine, contexts: Iterable[tuple[Sequence[int], str | None, Sequence[Asked]]], max_new_tokens: int
) -> Iterator[ServedTask]:
    """Answer the questions of each context over exact KV. Raises EngineError."""
    for tokens, namespace, asked in contexts:

        def exact_answers(
            tokens: Sequence[int] = tokens, namespace: str | None = namespace, asked: Sequence[Asked] = asked
        ) -> list[Answer]:
            with _open(engine, tokens, namespace) as shadow:
                return answer(engine, shadow.namespace, tokens, asked, max_new_tokens)

        yield ServedTask(tokens, namespace, asked, _patiently(exact_answers))


@dataclass(frozen=True, slots=True)
class ServedObjective:
    """f of EvolKV's equation 1 as a server measures it: the mean score of all questions over survivors of ``press``.
    Every call raises EngineError where the server refuses or is gone."""

    engine: ServerEngine
    tasks: Sequence[ServedTask]
    scorer: Scorer
    press: str
    max_new_tokens: int

    def __call__(self, budgets: Budgets) -> float:
        scores = [score for task in self.by_question(budgets) for score in task]
        if not scores:
            raise EngineError("every answer on exact KV is empty: expected at least one token of one of them")
        return sum(scores) / len(scores)

    @property
    def exact(self) -> float | None:
        """Mean score of the answers over exact KV; None for a scorer that compares with those."""
        if not isinstance(self.scorer, TaskScore):
            return None
        pairs = [pair for task in self.tasks for pair in zip(task.exact, task.asked, strict=True)]
        return sum(self.scorer.score(best, best, None, asked.reference) for best, asked in pairs) / len(pairs)

    def by_question(self, budgets: Budgets) -> list[list[float]]:
        """Score of every question, by task."""
        return [self._scores(task, budgets) for task in self.tasks]

    def _scores(self, task: ServedTask, budgets: Budgets) -> list[float]:
        return _patiently(lambda: self._asked_once(task, budgets))

    def _asked_once(self, task: ServedTask, budgets: Budgets) -> list[float]:
        kept = [min(budget, len(task.tokens)) for budget in budgets]
        share = min(sum(kept) / (len(kept) * len(task.tokens)), 0.9999)
        form, asked = Form(self.press, share, budget=BUDGET), (task.tokens, task.asked, self.scorer, task.exact)
        with _open(self.engine, task.tokens, task.namespace) as shadow:
            copy = self.engine.make_form(shadow, form, layer_tokens=kept)
            return qualities_of(self.engine, copy, *asked, self.max_new_tokens)


def _patiently(ask: Callable[[], T]) -> T:
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return ask()
        except (ShadowLost, ShadowRefused):
            time.sleep(PAUSE_S)
    return ask()


@contextmanager
def _open(engine: ServerEngine, tokens: Sequence[int], namespace: str | None) -> Iterator[Shadow]:
    shadow = engine.open_shadow(tokens, namespace)
    try:
        yield shadow
    finally:
        with suppress(EngineError):  # what went wrong first is what is told
            engine.close_shadow(shadow)
