"""Bytes that tenants may hold on each tier: what is too much shrinks first, and only its tenant's nodes give way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_evicpress.controller.controller import OVER_LIMIT
from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import Controlling
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.tenant_plans import TenantPlans

MOST_NODES = 8
"""Nodes that a round moves; the next one goes on."""

PAUSE_S = 0.5
"""After a plan of which nothing came."""


@dataclass(eq=False, repr=False)
class TenantLimits:
    """Looks, in rounds that have time, at what tenants hold beyond their limits. Running requests keep what they use: a
    limit is met once they end. ``room``: free bytes of the tiers below the GPU; ``mark_dirty``: one waits for it."""

    nodes: Mapping[int, Node]
    plans: TenantPlans
    controller: Controlling
    room: Callable[[], Mapping[Tier, int]]
    mark_dirty: Callable[[], None]

    def __post_init__(self) -> None:
        self._moving: dict[str, list[int]] = {}  # nodes of a tenant that the last plan about it sent on their way
        self._next_s: dict[tuple[str, Tier], float] = {}

    def enforce(self) -> None:
        """Shrink, then send down or drop, what tenants hold too much; a few nodes of each, and nothing of one whose
        nodes are still on their way."""
        now_s, controller = self.controller.now_s, self.controller
        for name, tier, excess in list(self.plans.excesses()):
            if self._is_moving(name) or now_s < self._next_s.get((name, tier), 0.0):
                continue
            before = self.plans.held_bytes(name, tier)
            decisions = self.plans.plan(name, tier, excess, self.room(), MOST_NODES)
            controller.execute(decisions, OVER_LIMIT, occasion=OVER_LIMIT)
            self._moving[name] = [decision.node_id for decision in decisions]
            if self.plans.held_bytes(name, tier) == before and not self._is_moving(name):
                self._next_s[name, tier] = now_s + PAUSE_S
                self.mark_dirty()  # what is counted as free below may not be had until more is freed there

    def _is_moving(self, name: str) -> bool:
        sent = (self.nodes.get(node_id) for node_id in self._moving.get(name, ()))
        return any(node is not None and node.kv.job is not None for node in sent)
