"""Policy object: statistics in, decisions out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from sglang_evicpress.core import Decision, LowerCopy, NodeStats, Tier
from sglang_evicpress.policy.base import Policy
from sglang_evicpress.policy.cost_model import CostSnapshot, TransferCost
from sglang_evicpress.policy.explain import explain
from sglang_evicpress.policy.index import NodeIndex
from sglang_evicpress.policy.plan import Plan
from sglang_evicpress.policy.promotion import CLEARLY, MAX_OPTIONS, Budget, PromotionSearch
from sglang_evicpress.policy.rewrites import plan_rewrites
from sglang_evicpress.policy.rules.adaptcache import AdaptCachePolicy
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy, checked_alpha

FULL_SHARE = 1 / 16
"""Of a tier: with less of it free, nodes are rewritten in fewer bytes rather than soon dropped."""


@runtime_checkable
class CostReader(Protocol):
    """A policy that weighs delays."""

    def read_costs(self, costs: CostSnapshot) -> None:
        """Take these costs instead of those before; steps worked out before are outdated."""
        ...


@runtime_checkable
class CurveReader(Protocol):
    """A policy that goes by one quality curve for all nodes."""

    def read_curve(self, curve: Sequence[float]) -> None:
        """Take this curve instead of the one before; what steps lose is outdated."""
        ...


class Planner:
    """Keeps an index of the nodes it is told of and, when a tier is short, plans what to do (EvicPress section 4.4).

    Pure: it reads no clock, file, tensor or metric. The same calls give the same plans in any process and on any rank.
    What it plans depends only on the present statistics of the nodes, never on the order or the number of the calls
    that brought them, but for as long as it sweeps. Planning changes nothing; whoever carries a decision out tells the
    policy by ``add`` or ``remove``, as for every other change.

    What changes the steps of many nodes (``refresh``, ``set_alpha``, ``read_mean_curve``) takes no longer than for some
    of them: the others are swept by ``advance``, which is to be called once a round. Until it has swept all of them,
    plans are made of those that it has, the first by the order before the change, each with its present step: they may
    lose a little more than they have to. Up to ``index.SMALL`` nodes are swept at once. See ``NodeIndex``.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.least_loss = 0.0
        """Utility: of a plan that loses no more, a better one is not sought, which takes milliseconds."""
        self.copy_loss: TransferCost | None = None
        """Utility that copying a node off the GPU takes, None for nothing: what is worth less below is dropped."""
        self.index = NodeIndex(policy)
        self.add = self.index.add
        self.remove = self.index.remove
        self.touch = self.index.touch
        self.lock = self.index.lock
        self.advance = self.index.advance

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those of the menu."""
        return self.policy.menu.tiers

    @property
    def alpha(self) -> float | None:
        """Alpha that quality is weighed by, None where it is not."""
        return self.policy.alpha if isinstance(self.policy, EvicPressPolicy | AdaptCachePolicy) else None

    @property
    def has_utility(self) -> bool:
        """True if a decision's loss is the utility it gives up, ``utility.utility``. Others weigh something else."""
        return isinstance(self.policy, EvicPressPolicy)

    def add_all(self, nodes: Iterable[NodeStats]) -> None:
        """Note nodes in any order. With ``add``, a parent has to come before its children: they are counted by it."""
        waiting: dict[int | None, NodeStats] = {node.id: node for node in nodes}
        for first in list(waiting):
            upwards = []
            node = waiting.pop(first, None)
            while node is not None:
                upwards.append(node)
                node = waiting.pop(node.parent_id, None)
            for one in reversed(upwards):
                self.add(one)

    def plan(
        self,
        tier: Tier,
        num_bytes: int,
        room: Mapping[Tier, int] | None = None,
        *,
        lower_copies_of: Mapping[int, Sequence[LowerCopy]] | None = None,
        most_nodes: int | None = None,
    ) -> list[Decision]:
        """Decisions, in order of execution, that free ``num_bytes`` on ``tier``, or all they can if that is less.

        ``room`` gives the free bytes of the tiers below; a tier that is not in it is full. Only unlocked nodes move,
        each at most once. A node leaves a tier only after all its children have. Without the step that freed the last
        byte the plan would fall short. 0 bytes or less need nothing: an empty plan. With ``most_nodes`` it ends when so
        many move, and then falls short.

        ``lower_copies_of`` makes the plan urgent, so that carrying it out waits for no byte to be written: a node
        leaves the tier only by a drop or to a tier that holds a copy of it, as which it goes on and which takes no room
        there: ``lower_copies_of[node_id]`` are those. ``room`` then does not count, and what is below does not move,
        unless it has to go because the node above it cannot go otherwise: to a copy of it where that node goes, or else
        by a drop.
        """
        plan = Plan(self.index, room or {}, lower_copies_of, self.copy_loss)
        try:
            missing = plan.free(int(tier), num_bytes, math.inf if most_nodes is None else most_nodes)
            if missing == 0 and most_nodes is None:  # the search may move more
                plan.search(int(tier), num_bytes, self.least_loss)
        finally:
            plan.close()
        return plan.decisions()

    def refresh(self, costs: CostSnapshot) -> None:
        """Decide by these costs from now on. Every step is to be worked out anew: call it when they have really
        changed."""
        if isinstance(self.policy, CostReader):
            self.policy.read_costs(costs)
            self.index.rebuild()

    def set_alpha(self, alpha: float) -> None:
        """Weigh quality by this alpha from now on: every step is worked out anew. Nothing for a policy that has no
        utility. ValueError unless it is a finite number of at least 0."""
        if isinstance(self.policy, EvicPressPolicy):
            self.policy.alpha = checked_alpha(alpha)
            self.index.rebuild()

    def read_mean_curve(self, curve: Sequence[float]) -> None:
        """Expect this quality of every form of the menu from now on, whatever node it is; see ``refresh``."""
        if isinstance(self.policy, CurveReader):
            self.policy.read_curve(curve)
            self.index.rebuild()

    def search_promotions(self, num_options: int = MAX_OPTIONS) -> PromotionSearch | None:
        """A search, to be gone through some nodes at a time, for moves that raise the total utility. None for a policy
        that has no utility."""
        if not isinstance(self.policy, EvicPressPolicy):
            return None
        return PromotionSearch(self.index, self.policy, num_options)

    def plan_promotions(self, room: Mapping[Tier, int], budget: Budget, held: Collection[int] = ()) -> list[Decision]:
        """Moves that raise the total utility; see ``PromotionSearch``, which this goes through at once."""
        search = self.search_promotions(budget.num_options)
        if search is None:
            return []
        search.look(len(self.index.candidates), held)
        return search.plan(room, budget, held)

    def plan_rewrites(self, nodes: Iterable[NodeStats], tier: Tier, room: int) -> list[Decision]:
        """Smaller forms for these nodes of ``tier``, of which ``room`` bytes are free; see ``rewrites.plan_rewrites``.
        None for a policy that has no utility."""
        if not isinstance(self.policy, EvicPressPolicy):
            return []
        price = 0.0
        if room < FULL_SHARE * (room + self.index.num_bytes[tier]) and (first := self.index.first(tier)) is not None:
            price = max(0.0, first[1].key) * CLEARLY  # else the node that loses least would stay as it is
        return plan_rewrites(self.policy, nodes, price if math.isfinite(price) else 0.0)

    def explain(self, node_id: int, value_of_hit: float = 1.0) -> dict[str, object]:
        """See ``explain.explain``. KeyError for a node that is not in the index."""
        return explain(self.policy, self.index.candidates[node_id], value_of_hit)
