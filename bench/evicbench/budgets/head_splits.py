"""Why heads that share their layer's slots by scores (Ada-KV) gain nothing on the testbed: how much that moves between
its two heads, and what the best fixed split of each layer gains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from evicbench.budgets.questions import Kept, objective_of, tasks_of, testbed
from evicbench.budgets.searches import SEARCHED_ON
from sglang_evicpress.press.layers import select_across_heads
from sglang_evicpress.profiler.local.model import Survivors
from sglang_evicpress.profiler.local.objective import Select, Task, survivors_of
from sglang_evicpress.search.layer_budgets import Budgets, uniform

SHARES = (0.5, 0.3, 0.4, 0.6, 0.7)
"""Of a layer's slots, for the first of its two heads; of equally good ones the first counts."""


def split_heads(scores: Tensor, budgets: Budgets, splits: Sequence[float]) -> Survivors:
    """In each layer as many slots as ``even_heads``, of which the first of two heads has the share of ``splits``."""
    masks = list[Tensor]()
    for layer, budget, share in zip(scores, budgets, splits, strict=True):
        num_tokens = layer.shape[-1]
        num_slots = 2 * min(budget, num_tokens)
        first = min(max(round(num_slots * share), num_slots - num_tokens), num_tokens)
        keep = torch.zeros_like(layer, dtype=torch.bool)
        for head, count in enumerate((first, num_slots - first)):
            keep[head, layer[head].topk(count).indices] = True
        masks.append(keep)
    return survivors_of(masks)


def moved(tasks: Sequence[Task], target: int) -> list[float]:
    """Share of each layer's slots that Ada-KV gives to another head than even heads do, mean over contexts."""
    counts = [[select_across_heads(layer, target).sum(-1) for layer in task.scores] for task in tasks]
    return [
        sum(float((of[layer] - target).clamp_min(0).sum()) for of in counts) / (2 * target * len(tasks))
        for layer in range(testbed().num_layers)
    ]


def best_splits(tasks: Sequence[Task], budgets: Budgets) -> list[float]:
    """In each layer the share that answers best while the other layers are even."""
    even = [SHARES[0]] * len(budgets)

    def score(layer: int, share: float) -> float:
        splits = [*even[:layer], share, *even[layer + 1 :]]
        return objective_of(tasks, _with(splits))(budgets)

    return [max(SHARES, key=partial(score, layer)) for layer in range(len(budgets))]


@cache
def chosen(target: int) -> tuple[Kept, str]:
    """The best splits at uniform layers, chosen on the questions of searches, and what is said of them."""
    tasks, budgets = tasks_of(SEARCHED_ON.contexts()), uniform(testbed().num_layers, target)
    splits = best_splits(tasks, budgets)
    slots = "/".join(f"{share:.0%}" for share in moved(tasks, target))
    told = f"{'/'.join(f'{share:g}' for share in splits)} to the first head; Ada-KV moves {slots} of the slots"
    return Kept(budgets, _with(splits)), told


def _with(splits: Sequence[float]) -> Select:
    return partial(split_heads, splits=splits)
