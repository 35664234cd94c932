"""Budgets per cluster of traffic: contexts grouped by the shape of their measured curves, one search for each group.

A group's budgets are kept only where they gain on other questions; what that leaves is judged on contexts that nobody
has seen, which join the group whose curve is nearest to theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evicbench.budgets.comparisons import Difference
from evicbench.budgets.questions import Questions, Scores, mean, objective_of, tasks_of, testbed
from evicbench.budgets.searches import TARGETS, TRANSFERRED, Search
from evicbench.report import Line
from sglang_evicpress.profiler.local.objective import Task
from sglang_evicpress.search.layer_budgets import Budgets, expanded, uniform

FAMILIES = ("needle", "multikv", "redundant", "mapping", "hop", "record")
NUM_GROUPS = 2
NUM_CURVE_QUESTIONS = 2
"""Of each context, for its curve; the others are for what is searched or judged."""

SEARCHED_ON = Questions(48, 300, FAMILIES, 768)
VALIDATED_ON = Questions(96, 301, FAMILIES, 768)
JUDGED_ON = Questions(252, 9, FAMILIES, 768)

Curves = NDArray[np.float64]


def split(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """The same contexts with the questions of their curve, and with the others."""
    first, last = slice(None, NUM_CURVE_QUESTIONS), slice(NUM_CURVE_QUESTIONS, None)
    parts = [
        [replace(task, asked=task.asked[some], exact=task.exact[some]) for task in tasks] for some in (first, last)
    ]
    return parts[0], parts[1]


def curves(tasks: Sequence[Task]) -> Curves:
    """[contexts, targets], in [0, 1]: mean score of each context with uniform budgets, over the largest of them."""
    layers = testbed().num_layers
    scores = [objective_of(tasks).by_question(uniform(layers, target)) for target in TARGETS]
    means = np.array([[sum(row) / len(row) for row in some] for some in scores]).T
    return means / np.maximum(means.max(1, keepdims=True), 1e-6)


def nearest(points: Curves, centres: Curves) -> NDArray[np.int64]:
    distances = ((points[:, None] - centres[None]) ** 2).sum(-1)
    return distances.argmin(1)


def grouped(points: Curves, num_groups: int, rounds: int = 50) -> Curves:
    """Centres of k-means, from points spread evenly in the order of their mean."""
    order = points.mean(1).argsort()
    centres = points[order[np.linspace(0, len(points) - 1, num_groups + 2).astype(int)[1:-1]]]
    for _ in range(rounds):
        own = nearest(points, centres)
        centres = np.array([points[own == k].mean(0) if (own == k).any() else centres[k] for k in range(num_groups)])
    return centres


def of_group(tasks: Sequence[Task], own: NDArray[np.int64], group: int) -> list[Task]:
    return [task for task, each in zip(tasks, own, strict=True) if each == group]


def searched(tasks: Sequence[Task]) -> Budgets:
    return expanded(Search(TRANSFERRED).run(tasks).shares, TRANSFERRED)


def measure_clusters() -> Iterator[Line]:
    asked, others = split(tasks_of(SEARCHED_ON.contexts()))
    points = curves(asked)
    centres = grouped(points, NUM_GROUPS)
    own = nearest(points, centres)
    common = searched(others)
    groups = [searched(of_group(others, own, k)) for k in range(NUM_GROUPS)]
    asked, others = split(tasks_of(VALIDATED_ON.contexts()))
    own = nearest(curves(asked), centres)
    kept, shown = list[Budgets](), list[str]()
    for k, budgets in enumerate(groups):
        some = of_group(others, own, k)
        objective = objective_of(some)
        gain = Difference.of(objective.by_question(budgets), objective.by_question(common))
        kept.append(budgets if gain.low > 0.0 else common)
        verdict = "kept" if gain.low > 0.0 else "not kept"
        shown.append(f"group {k + 1} ({len(some)} contexts) {'/'.join(map(str, budgets))} {gain}: {verdict}")
    asked, others = split(tasks_of(JUDGED_ON.contexts()))
    own = nearest(curves(asked), centres)
    mine, theirs = Scores(), Scores()
    for k, budgets in enumerate(kept):
        some = of_group(others, own, k)
        if some:
            theirs += (scores := objective_of(some).by_question(common))
            mine += scores if budgets == common else objective_of(some).by_question(budgets)
    gain = Difference.of(mine, theirs)
    yield Line(
        f"budgets per cluster of traffic, {NUM_GROUPS} groups, {TRANSFERRED} tokens a layer: F1 beside one for all",
        "what is kept after validation does not lose: 95 % interval not below 0",
        f"{gain}; {mean(mine):.4f} and {mean(theirs):.4f}; common {'/'.join(map(str, common))}, {'; '.join(shown)}",
        gain.high >= 0.0,
    )
