"""The policy in use, and its index in step with the tree: every change is told when it happens, none costs a walk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Decision, LowerCopy, NodeStats, Tier
from sglang_evicpress.introspect.census import Census
from sglang_evicpress.patches.tree.namespaces import salt_of
from sglang_evicpress.patches.tree.node import census_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, TransferCost
from sglang_evicpress.policy.index import SMALL
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.promotion import Budget, PromotionSearch
from sglang_evicpress.policy.rules.compress_first import CompressFirstPolicy
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.tenant_plans import TenantPlans
from sglang_evicpress.policy.wait_cost import SEARCHED_FROM_S
from sglang_evicpress.tenants import Tenant

MOST_PLANNED = 4
"""Nodes that one plan in the background may be about, on average: planned and carried out, a millisecond or two."""

MOST_PROMOTED = 16
"""Nodes that one plan brings up, each of which may need another plan that makes room for it."""

SWEPT_PER_ROUND = 32
"""Nodes of which a round works out the next step, of some 10 us each. No clock says how many: ranks sweep alike."""

LOOKED_PER_ROUND, TOLD_PER_ROUND = 128, 8
"""Nodes at which a round looks, and of these such as are shown to the policy again, of some 40 us each."""


class Terms(Protocol):
    """Costs, as the policy has them."""

    costs: CostSnapshot
    weighed: CostSnapshot

    def value_of_hit(self) -> float: ...


@dataclass(eq=False, repr=False)
class PolicySync:
    """Keeps ``planner``, which each flush makes anew, the one at the start too, and ``census``. What changes the steps
    of many nodes only begins to: each round's ``advance`` does some of it. ``tiers`` are those
    there are, ``mean_curve`` is what was measured; ``lower_copies_of``: what lower tiers have of nodes, by id;
    ``stats_of``: a node as the policy sees it; ``mark_dirty``: something may be planned now that could
    not be. ``tenants``: ``tenant_plans`` are for those of them that have limits."""

    config: EvicPressConfig
    menu: Menu
    nodes: Mapping[int, Node]
    terms: Terms
    tiers: Callable[[], tuple[Tier, ...]]
    mean_curve: Callable[[], Sequence[float]]
    lower_copies_of: Callable[[], Mapping[int, Sequence[LowerCopy]]]
    stats_of: Callable[[Node], NodeStats]
    mark_dirty: Callable[[], None]
    num_failed: Counter[str]
    tenants: Sequence[Tenant] = ()

    def __post_init__(self) -> None:
        self.census = Census()
        self.alpha = self.config.start_alpha
        self.planner: Planner
        self.tenant_plans = TenantPlans({tenant.name: tenant.limits for tenant in self.tenants})
        limited = (tenant for tenant in self.tenants if tenant.limits)
        self._tenant_of_salt = {tenant.cache_salt: tenant.name for tenant in limited}
        self._unseen: list[int] = []  # ids of nodes of which another quality may be expected now
        self._tells_all = self._tells_profiled = False
        self._search: PromotionSearch | None = None

    def renew(self) -> None:
        """A policy that knows no node yet."""
        self.planner = self._make_planner()
        self.tenant_plans.renew(self._make_tenant_planner)
        self._unseen.clear()
        self._tells_all = self._tells_profiled = False
        self._search = None

    def _make_planner(self) -> Planner:
        menu = replace(self.menu, tiers=self.tiers())  # the SSD comes and goes
        return make_planner(
            self.config.policy, menu, alpha=self.alpha, costs=self.terms.weighed, mean_curve=self.mean_curve()
        )

    def _make_tenant_planner(self) -> Planner:
        """For what a tenant holds too much, which is to shrink first, as far as the server's quality target lets it;
        as the policy orders it where that weighs no quality."""
        weigher = self.planner.policy
        if isinstance(weigher, EvicPressPolicy):
            return Planner(CompressFirstPolicy(weigher, self.config.target_quality or 0.0))
        return self._make_planner()

    def rebuild(self) -> None:
        """A new policy that knows every node."""
        self.renew()
        stats = {node_id: self.stats_of(node) for node_id, node in self.nodes.items()}
        self.planner.add_all(stats.values())
        if self._tenant_of_salt:
            for node_id in self.planner.index.candidates:  # each after its parent
                self._tell_tenant(self.nodes[node_id], stats[node_id])

    def clear(self) -> None:
        """The tree is gone."""
        self.renew()
        self.census.clear()

    def refresh(self, costs: CostSnapshot) -> None:
        """Plan by these costs from now on."""
        self.planner.refresh(costs)
        self.tenant_plans.refresh(costs)

    def set_alpha(self, alpha: float) -> None:
        """Weigh quality by this alpha from now on."""
        self.alpha = alpha
        self.planner.set_alpha(alpha)
        self.tenant_plans.rebuild()
        self.mark_dirty()

    def read_mean_curve(self) -> None:
        """Plan by the present quality of all contexts that were profiled, where one curve counts for all nodes."""
        self.planner.read_mean_curve(self.mean_curve())
        self.tenant_plans.read_mean_curve(self.mean_curve())

    def expect_anew(self, *, forms_changed: bool, of_profiled: bool = False) -> None:
        """Another quality is expected of nodes without a curve of their own, which all share one that has changed.
        ``forms_changed``: other forms can be chosen for them as well; ``of_profiled``: also for the others."""
        self.planner.index.rebuild()
        self.tenant_plans.rebuild()
        self._tells_all |= forms_changed
        self._tells_profiled |= of_profiled
        rest = set(self._unseen)  # of the change before: else the oldest nodes would never be told, being the last
        self._unseen = [node_id for node_id in self.nodes if node_id not in rest] + self._unseen
        if len(self._unseen) <= SMALL:
            self._look(SMALL, SMALL)

    def advance(self) -> None:
        """Some of what is still to be done at many nodes; called once a round, so that ranks do it alike."""
        value_of_hit, copying = self.terms.value_of_hit(), self.terms.costs.copy
        self.planner.least_loss = SEARCHED_FROM_S * value_of_hit
        self.planner.copy_loss = TransferCost(copying.fixed_s * value_of_hit, copying.bytes_per_s / value_of_hit)
        self.tenant_plans.advance(SWEPT_PER_ROUND)
        if self._unseen:
            self._look(LOOKED_PER_ROUND, TOLD_PER_ROUND)
        if self.planner.advance(SWEPT_PER_ROUND) and not self.planner.index.is_sweeping:
            self.mark_dirty()

    def finish(self) -> None:
        """All of it at once, for somebody who looks."""
        self._look(len(self._unseen), len(self._unseen))
        self.planner.index.finish()
        self.tenant_plans.finish()

    def _look(self, num_looked: int, num_told: int) -> None:
        """Show the policy the next nodes that hold what is valued otherwise now."""
        for _ in range(min(num_looked, len(self._unseen))):
            node = self.nodes.get(self._unseen.pop())
            if node is None or (node.kv.curve is not None and not self._tells_profiled):
                continue
            if self._tells_all or not node.kv.form.is_exact or node.kv.copies:
                self._tell(node)
                num_told -= 1
                if num_told <= 0:
                    break
        self._tells_all &= bool(self._unseen)
        self._tells_profiled &= bool(self._unseen)

    # ---- what happens to nodes

    def on_node_changed(self, node: Node) -> None:
        self.census.put(node.id, census_of(node))
        if not math.isfinite(node.kv.weight):  # no plan can be made with it
            self.num_failed["note weight"] += 1
            node.kv.weight = 0.0
        self._tell(node)
        self.mark_dirty()

    def _tell(self, node: Node) -> None:
        stats = self.stats_of(node)
        self.planner.add(stats)
        if self._tenant_of_salt:
            self._tell_tenant(node, stats)

    def _tell_tenant(self, node: Node, stats: NodeStats) -> None:
        self.tenant_plans.add(self._tenant_of_salt.get(salt_of(node.key.extra_key)), stats)

    def on_node_deleted(self, node: Node) -> None:
        if node.id in self.planner.index.candidates:
            self.remove(node.id)
        self.census.remove(node.id)

    def remove(self, node_id: int) -> None:
        """Let no plan be about the node any more: it is about to go."""
        self.planner.remove(node_id)
        self.tenant_plans.remove(node_id)

    def touch(self, node: Node) -> None:
        """The node was matched, or its hits have changed."""
        kv = node.kv
        self.planner.touch(node.id, kv.weight, kv.num_hits, kv.last_use)
        self.tenant_plans.touch(node.id, kv.weight, kv.num_hits, kv.last_use)

    def lock(self, node_id: int, is_locked: bool) -> None:
        """A running request takes or gives back the node."""
        self.planner.lock(node_id, is_locked)
        self.tenant_plans.lock(node_id, is_locked)

    # ---- plans

    def plan_without_copies(self, tier: Tier, num_bytes: int) -> Sequence[Decision]:
        """See ``Planner.plan``: of what lower tiers have already, and of drops."""
        return self.planner.plan(tier, num_bytes, lower_copies_of=self.lower_copies_of())

    def look_for_promotions(self, held: Collection[int]) -> bool:
        """Look at some nodes more; True when all were looked at, and a plan can be made."""
        if self._search is None:
            self._search = self.planner.search_promotions(MOST_PROMOTED)
        return self._search is None or not self._search.look(LOOKED_PER_ROUND // 2, held)

    def plan_promotions(self, num_bytes: int, room: Mapping[Tier, int], held: Collection[int]) -> Sequence[Decision]:
        """Decisions that bring nodes onto the GPU, or give them their exact KV there; not the nodes ``held``. Of those
        that were found by ``look_for_promotions``."""
        search, self._search = self._search, None
        if search is None:
            return []
        decisions = search.plan(room, Budget(num_bytes, 1.0, MOST_PROMOTED), held)
        return list(self._allowed(decisions))

    def _allowed(self, decisions: Iterable[Decision]) -> Iterator[Decision]:
        """Decisions that bring nodes onto the GPU, which their tenants may hold there all together."""
        added = Counter[str | None]()
        for decision in decisions:
            if not decision.is_promotion or decision.option.tier != Tier.GPU:
                continue
            tenant = self.tenant_plans.tenant_of(decision.node_id)
            former = decision.source.num_bytes if decision.source.tier == Tier.GPU else 0
            num_bytes = added[tenant] + decision.option.num_bytes - former
            if num_bytes <= self.tenant_plans.room_of(decision.node_id, Tier.GPU):
                added[tenant] = num_bytes
                yield decision

    def held_bytes(self, tier: Tier) -> int:
        """Bytes that nodes hold on a tier."""
        return self.planner.index.num_bytes[tier]

    def num_nodes(self, tier: Tier) -> int:
        return self.planner.index.num_on[tier]

    def tenant_differences(self) -> Iterator[str]:
        """What the plans of tenants have otherwise than the tree, one sentence each; none while nothing is wrong."""
        tenant_of = lambda node_id: self._tenant_of_salt.get(salt_of(self.nodes[node_id].key.extra_key))  # noqa: E731
        return self.tenant_plans.differences(self.planner.index, tenant_of)

    def forms_on(self, tier: Tier) -> dict[str, dict[str, int]]:
        """Nodes, tokens and bytes that a tier holds, by form, copies of nodes on a faster tier too."""
        slot_bytes, described = self.menu.slot_bytes, dict[str, dict[str, int]]()
        for form, (num_nodes, num_tokens, num_slots) in self.census.held_on(tier).items():
            num_bytes = num_slots * slot_bytes
            stored = num_bytes if tier == Tier.GPU else self.menu.stored_bytes(form, num_bytes)
            described[str(form)] = {"nodes": num_nodes, "tokens": num_tokens, "bytes": stored}
        return described

    def bounded(self, tier: Tier, num_bytes: int, num_nodes: int = MOST_PLANNED) -> int:
        """So many of the bytes as a plan about ``num_nodes`` of common size frees."""
        return min(num_bytes, num_nodes * self.held_bytes(tier) // max(1, self.num_nodes(tier)))
