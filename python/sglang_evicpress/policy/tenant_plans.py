"""Plans for tenants that hold more than they may: of their own nodes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from sglang_evicpress.core import Decision, NodeStats, Tier
from sglang_evicpress.policy.base import Candidate
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.index import NodeIndex
from sglang_evicpress.policy.planner import Planner


class TenantPlans:
    """A planner for each tenant that has limits, ``limits[name]`` bytes by tier, which knows the tenant's nodes and no
    others; where nobody has any, nothing is kept.

    What a node holds counts on the tier that it is on. As the nodes of a tenant are whole branches below the root,
    every plan keeps prefixes whole. What happens to nodes, and what outdates their steps, is told as to the planner of
    all nodes.
    """

    def __init__(self, limits: Mapping[str, Mapping[Tier, int]]) -> None:
        self.limits = {name: dict(sorted(by_tier.items())) for name, by_tier in limits.items() if by_tier}
        self._planners: dict[str, Planner] = {}
        self._tenant_of: dict[int, str] = {}  # by node

    def renew(self, make: Callable[[], Planner]) -> None:
        """Planners that know no node yet."""
        self._planners = {name: make() for name in self.limits}
        self._tenant_of.clear()

    # ---- what happens to nodes

    def add(self, name: str | None, node: NodeStats) -> None:
        """Note a new node of a tenant, or whatever has changed about a known one."""
        if name is not None and name in self._planners:
            self._tenant_of[node.id] = name
            self._planners[name].add(node)

    def remove(self, node_id: int) -> None:
        if (name := self._tenant_of.pop(node_id, None)) is not None:
            self._planners[name].remove(node_id)

    def touch(self, node_id: int, weight: float, num_hits: int, last_use: int) -> None:
        if (name := self._tenant_of.get(node_id)) is not None:
            self._planners[name].touch(node_id, weight, num_hits, last_use)

    def lock(self, node_id: int, is_locked: bool) -> None:
        if (name := self._tenant_of.get(node_id)) is not None:
            self._planners[name].lock(node_id, is_locked)

    # ---- what outdates many steps

    def refresh(self, costs: CostSnapshot) -> None:
        for planner in self._planners.values():
            planner.refresh(costs)
            planner.index.rebuild()

    def read_mean_curve(self, curve: Sequence[float]) -> None:
        for planner in self._planners.values():
            planner.read_mean_curve(curve)

    def rebuild(self) -> None:
        for planner in self._planners.values():
            planner.index.rebuild()

    def advance(self, max_nodes: int) -> None:
        """Sweep some nodes of each; see ``Planner.advance``."""
        for planner in self._planners.values():
            planner.advance(max_nodes)

    def finish(self) -> None:
        for planner in self._planners.values():
            planner.index.finish()

    # ---- what they hold

    def held_bytes(self, name: str, tier: Tier) -> int:
        """Bytes that the nodes of a tenant with limits hold on a tier."""
        return self._planners[name].index.num_bytes[tier]

    def excesses(self) -> Iterator[tuple[str, Tier, int]]:
        """(tenant, tier, bytes) of what is held beyond a limit and may move, the fastest tier of each first."""
        for name, by_tier in self.limits.items():
            index = self._planners[name].index
            for tier, limit in by_tier.items():
                excess = index.num_bytes[tier] - limit
                if excess > 0 and index.num_bytes[tier] > index.locked_bytes[tier]:
                    yield name, tier, excess

    def tenant_of(self, node_id: int) -> str | None:
        """The tenant with limits whose node it is."""
        return self._tenant_of.get(node_id)

    def room_of(self, node_id: int, tier: Tier) -> float:
        """Bytes that the tenant of a node may hold on a tier beyond what it does; infinite where it has no limit."""
        name = self._tenant_of.get(node_id)
        limit = None if name is None else self.limits[name].get(tier)
        return math.inf if name is None or limit is None else limit - self.held_bytes(name, tier)

    def plan(
        self, name: str, tier: Tier, num_bytes: int, room: Mapping[Tier, int], most_nodes: int
    ) -> Sequence[Decision]:
        """Decisions about the tenant's own nodes that free so many bytes on a tier; ``room`` is what is free below for
        anyone, of which it takes what its limits leave. See ``Planner.plan``."""
        planner, limits = self._planners[name], self.limits[name]
        held = planner.index.num_bytes
        own = {
            below: max(0, min(free, limits[below] - held[below])) if below in limits else free
            for below, free in room.items()
        }
        return planner.plan(tier, num_bytes, own, most_nodes=most_nodes)

    # ---- for who looks

    def describe(self) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes held and allowed by tenant and tier; allowed only where there is a limit."""
        return {
            name: {
                "held_bytes": {tier.label: self.held_bytes(name, tier) for tier in self._planners[name].tiers},
                "limit_bytes": {tier.label: limit for tier, limit in by_tier.items()},
            }
            for name, by_tier in self.limits.items()
        }

    def differences(self, index: NodeIndex, tenant_of: Callable[[int], str | None]) -> Iterator[str]:
        """What these planners have otherwise than the index of all nodes: one sentence each."""
        wanted: dict[str, list[Candidate]] = {name: [] for name in self.limits}
        for node_id, candidate in index.candidates.items() if wanted else ():
            if (name := tenant_of(node_id)) in wanted:
                wanted[name].append(candidate)
        for name, candidates in wanted.items():
            own = self._planners[name].index
            if {candidate.id for candidate in candidates} != set(own.candidates):
                yield f"the plans of a tenant know {len(own.candidates)} nodes, it has {len(candidates)}"
            for tier in Tier:
                there = [candidate for candidate in candidates if candidate.tier == tier]
                held = sum(candidate.num_bytes for candidate in there)
                locked = sum(candidate.num_bytes for candidate in there if candidate.is_locked)
                if (own.num_bytes[tier], own.locked_bytes[tier]) != (held, locked):
                    yield (
                        f"the plans of a tenant have {own.num_bytes[tier]} bytes on {tier.label}, "
                        f"{own.locked_bytes[tier]} locked; it holds {held}, {locked} locked"
                    )
