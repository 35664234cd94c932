"""Least recently used first: the baseline that only drops, as the stock radix cache does."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sglang_evicpress.core import Decision, NodeStats, Option


@dataclass(frozen=True, slots=True)
class LruPolicy:
    """Drops childless nodes by ``last_use``, then id; a parent is a candidate once its last child is gone.

    It never compresses and weighs nothing, so ``utility_loss`` of its decisions is 0.
    """

    name: ClassVar[str] = "lru"
    compresses: ClassVar[bool] = False

    def plan(self, nodes: Sequence[NodeStats], demand_slots: int) -> list[Decision]:
        droppable = {node.id: (node, drop) for node in nodes if (drop := _drop_option(node)) is not None}
        children_left = {node_id: node.num_children for node_id, (node, _) in droppable.items()}
        heap = [(node.last_use, node.id) for node, _ in droppable.values() if node.num_children == 0]
        heapq.heapify(heap)
        decisions: list[Decision] = []
        freed_slots = 0
        while heap and freed_slots < demand_slots:
            _, node_id = heapq.heappop(heap)
            node, drop = droppable[node_id]
            reason = f"drop: last used at {node.last_use}"
            decisions.append(Decision(node_id, drop, node.num_slots, 0.0, reason))
            freed_slots += node.num_slots
            if node.parent_id is not None and node.parent_id in droppable:
                children_left[node.parent_id] -= 1
                if children_left[node.parent_id] == 0:
                    heapq.heappush(heap, (droppable[node.parent_id][0].last_use, node.parent_id))
        return decisions


def _drop_option(node: NodeStats) -> Option | None:
    return next((option for option in node.options if option.form is None), None)
