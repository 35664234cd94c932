"""Contexts compressed by the window of a whole prompt: the queries of its question are among the last 32, as in EvolKV
and as in a node that a request's own prefill wrote. The searches never saw such a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from evicbench.budgets.comparisons import Difference, better
from evicbench.budgets.layers import HELD_OUT, rivals
from evicbench.budgets.questions import BATCH, PRESS, Kept, Questions, Scores, mean, objective_of, tasks_of, testbed
from evicbench.budgets.searches import TRANSFERRED, Search, committed
from evicbench.report import Line
from sglang_evicpress.press import get_press, scored
from sglang_evicpress.profiler.local.objective import SINKS, Task

NUM_CONTEXTS = 252
SAME, OTHERS = "the question that the window saw", "other questions"


def with_question(task: Task, tokens: list[int]) -> Task:
    """The same context, scored by the last queries of its prompt with its first question."""
    (prompt,) = testbed().prefill([[*tokens, *task.asked[0].tokens]])
    node = replace(task.context.node, window=prompt.node.window)
    return replace(task, scores=scored(get_press(PRESS), node, SINKS))


def answered(kept: Mapping[str, Kept], questions: Questions) -> dict[str, dict[str, Scores]]:
    """Scores of ``SAME`` and ``OTHERS``, by name."""
    scores = {part: {name: Scores() for name in kept} for part in (SAME, OTHERS)}
    contexts = questions.contexts()
    while batch := list(islice(contexts, BATCH)):
        pairs = zip(tasks_of(iter(batch)), batch, strict=True)
        tasks = [with_question(task, tokens) for task, (tokens, _) in pairs]
        for name, each in kept.items():
            for row in objective_of(tasks, each.select).by_question(each.budgets):
                scores[SAME][name].append(row[:1])
                scores[OTHERS][name].append(row[1:])
    return scores


def measure_windows(num_contexts: int = NUM_CONTEXTS) -> Iterator[Line]:
    budgets = committed(Search(TRANSFERRED))
    kept = rivals(TRANSFERRED) | {"found": Kept(budgets)}
    for part, scores in answered(kept, replace(HELD_OUT, num_contexts=num_contexts)).items():
        rival = better(scores, tuple(rivals(TRANSFERRED)))
        gain = Difference.of(scores["found"], scores[rival])
        means = ", ".join(f"{name.split()[0]} {mean(scores[name]):.4f}" for name in kept)
        yield Line(
            f"{TRANSFERRED} tokens a layer, a question in the window of the press, {part}: F1 of found ones",
            "95 % interval of the gain above 0",
            f"{gain}; {means}; {sum(map(len, scores['found']))} questions",
            gain.low > 0.0,
        )
