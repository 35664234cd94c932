"""Measures the quality of a context's forms: the same questions asked of shadows of its KV, exact and compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sglang_evicpress.core import Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.engine import Answer, EngineError, NotMakeable, Shadow, ShadowLost, ShadowRefused
from sglang_evicpress.profiler.scorers import Scorer
from sglang_evicpress.profiler.scorers.logprob import observed_quality
from sglang_evicpress.quality.profile import Profile, query_set
from sglang_evicpress.quality.recorder import Query
from sglang_evicpress.quality.running_stats import RunningStats

NUM_LIKELIEST = 1
"""Tokens that ``observe`` asks for at each place: what a served answer could have been instead."""


class NothingMade(EngineError):
    """Not one of the forms can be made of the context."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: the ``tokens`` behind the context, at least one, and the ``reference`` answer where one is known."""

    tokens: Sequence[int]
    reference: str | None = None


def profile_context(
    engine: ServerEngine,
    tokens: Sequence[int],
    namespace: str | None,
    queries: Sequence[Asked],
    forms: Iterable[Form],
    scorer: Scorer,
    *,
    max_new_tokens: int = 256,
    clock: Callable[[], float] = time.time,
    on_progress: Callable[[], None] | None = None,
) -> Profile:
    """The qualities of ``forms`` of the context ``tokens``, whole blocks, in a shadow that is closed whatever happens.

    Forms that cannot be made of this context are left out. When the room ends midway, the profile has those that were
    complete by then; with none, ShadowRefused or ShadowLost is raised, and NothingMade when not one form can be made.
    Raises ValueError without queries or lossy forms. ``on_progress`` is called for each form done or left out.
    """
    wanted = [form for form in dict.fromkeys(forms) if not form.is_exact]
    if not queries or not all(len(query.tokens) for query in queries):
        raise ValueError(f"{len(queries)} queries are given: expected at least one, and in each at least one token")
    if not wanted:
        raise ValueError("no form is given: expected at least one that is not exact")
    measured: dict[Form, RunningStats] = {}
    shadow = engine.open_shadow(tokens, namespace)
    try:
        exact = answer(engine, shadow.namespace, tokens, queries, max_new_tokens)
        results = measure_forms(
            engine,
            shadow,
            tokens,
            queries,
            wanted,
            scorer,
            exact,
            max_new_tokens=max_new_tokens,
            on_progress=on_progress,
        )
        try:
            for form, evidence in results:
                measured[form] = evidence
        except (ShadowRefused, ShadowLost):
            if not measured:
                raise
    except BaseException:
        with suppress(EngineError):  # what went wrong first is what is told
            engine.close_shadow(shadow)
        raise
    with suppress(ShadowLost):  # there is nothing left to free
        engine.close_shadow(shadow)
    if not measured:
        raise NothingMade(f"none of {', '.join(map(str, wanted))} can be made of context {shadow.key.hex()}")
    asked = query_set([query.tokens for query in queries])
    return Profile(shadow.key, shadow.num_tokens, measured, scorer.name, asked, len(queries), clock())


def measure_forms(
    engine: ServerEngine,
    shadow: Shadow,
    tokens: Sequence[int],
    queries: Sequence[Asked],
    forms: Sequence[Form],
    scorer: Scorer,
    exact: Sequence[Answer],
    *,
    max_new_tokens: int = 256,
    on_progress: Callable[[], None] | None = None,
) -> Generator[tuple[Form, RunningStats], None, None]:
    """Each form that can be made of an open shadow, one at a time, as soon as it is complete; ``exact`` are the
    answers on the exact copy. Raises what the engine raises; the form at hand is dropped before.

    An empty exact answer has no likelihood: without generation such a query counts in no form, and when there is no
    other EngineError is raised before anything is made.
    """
    if not scorer.needs_generation and not any(best.token_ids for best in exact):
        raise EngineError("every answer on exact KV is empty: expected at least one token of one of them")
    for form in forms:
        try:
            copy = engine.make_form(shadow, form)
        except NotMakeable:
            copy = None
        if copy is not None:
            try:
                qualities = qualities_of(engine, copy, tokens, queries, scorer, exact, max_new_tokens)
            finally:
                with suppress(EngineError):  # closing the shadow frees it as well
                    engine.drop_form(shadow, form)
            yield form, RunningStats.of(qualities)
        if on_progress is not None:
            on_progress()


def answer(
    engine: ServerEngine, namespace: str, tokens: Sequence[int], queries: Sequence[Asked], max_new_tokens: int
) -> list[Answer]:
    """The greedy answers to ``queries`` about the copy of ``tokens`` in ``namespace``."""
    return engine.generate(namespace, [[*tokens, *query.tokens] for query in queries], max_new_tokens)


def observe(engine: ServerEngine, shadow: Shadow, tokens: Sequence[int], queries: Sequence[Query]) -> list[float]:
    """The quality in [0, 1] of each answer that was served, greedily, judged by how likely exact KV finds it.

    Raises ValueError for an empty answer, and what ``score`` raises.
    """
    if not all(query.answer for query in queries):
        raise ValueError("an answer is empty: expected at least one token to judge")
    prompts = [[*tokens, *query.tokens] for query in queries]
    served = engine.score(shadow.namespace, prompts, [query.answer for query in queries], top=NUM_LIKELIEST)
    return [observed_quality(likelihood) for likelihood in served]


def qualities_of(
    engine: ServerEngine,
    namespace: str,
    tokens: Sequence[int],
    queries: Sequence[Asked],
    scorer: Scorer,
    exact: Sequence[Answer],
    max_new_tokens: int,
) -> list[float]:
    """Score of each query about the copy of ``tokens`` in ``namespace``, beside its ``exact`` answer; of a scorer that
    needs no generation those with an empty exact answer are left out."""
    pairs = list(zip(queries, exact, strict=True))
    if scorer.needs_generation:
        given = answer(engine, namespace, tokens, queries, max_new_tokens)
        scorer.prepare([each.text for each in (*exact, *given)])
        return [
            scorer.score(best, text, None, query.reference) for (query, best), text in zip(pairs, given, strict=True)
        ]
    pairs = [(query, best) for query, best in pairs if best.token_ids]
    prompts = [[*tokens, *query.tokens] for query, _ in pairs]
    likelihoods = engine.score(namespace, prompts, [best.token_ids for _, best in pairs])
    return [
        scorer.score(best, None, likelihood, query.reference)
        for (query, best), likelihood in zip(pairs, likelihoods, strict=True)
    ]
