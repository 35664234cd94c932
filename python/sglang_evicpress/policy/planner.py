"""Policy object: statistics in, decisions out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from sglang_evicpress.core import Decision, NodeStats, Tier, Way
from sglang_evicpress.policy.base import Rule
from sglang_evicpress.policy.cost_model import Costs
from sglang_evicpress.policy.explain import explain
from sglang_evicpress.policy.index import Book
from sglang_evicpress.policy.plan import Plan
from sglang_evicpress.policy.promotion import Budget, rearrange
from sglang_evicpress.policy.rules.evicpress import EvicPressRule


@runtime_checkable
class CostReader(Protocol):
    """A rule that weighs delays."""

    def read_costs(self, costs: Costs) -> None:
        """Take these costs instead of those before; steps worked out before are outdated."""
        ...


class Policy:
    """Keeps a book of the nodes it is told of and, when a tier is short, plans what to do (EvicPress section 4.4).

    Pure: it reads no clock, file, tensor or metric. What it plans depends only on the present statistics of the nodes,
    never on the order or the number of the calls that brought them: the same nodes give the same plan in any process
    and on any rank. Planning changes nothing; whoever carries a decision out tells the policy by ``put`` or
    ``forget``, as for every other change.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.book = Book(rule)
        self.put = self.book.put
        self.forget = self.book.forget
        self.touch = self.book.touch
        self.lock = self.book.lock
        self.reweigh = self.book.reweigh

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def has_utility(self) -> bool:
        """True if a decision's loss is the utility it gives up, ``utility.utility``. Others weigh something else."""
        return isinstance(self.rule, EvicPressRule)

    def put_all(self, nodes: Iterable[NodeStats]) -> None:
        """Note nodes in any order. With ``put``, a parent has to come before its children: they are counted by it."""
        waiting: dict[int | None, NodeStats] = {node.id: node for node in nodes}
        for first in list(waiting):
            upwards = []
            node = waiting.pop(first, None)
            while node is not None:
                upwards.append(node)
                node = waiting.pop(node.parent_id, None)
            for one in reversed(upwards):
                self.put(one)

    def plan(
        self,
        tier: Tier,
        num_bytes: int,
        room: Mapping[Tier, int] | None = None,
        *,
        ready: Mapping[int, Sequence[Way]] | None = None,
    ) -> list[Decision]:
        """Decisions, in order of execution, that free ``num_bytes`` on ``tier``, or all they can if that is less.

        ``room`` gives the free bytes of the tiers below; a tier that is not in it is full. Only unlocked nodes move,
        each at most once. A node leaves a tier only after all its children have. Without the step that freed the last
        byte the plan would fall short. 0 bytes or less need nothing: an empty plan.

        ``ready`` makes the plan urgent, so that carrying it out waits for no byte to be written: a node leaves the tier
        only by a drop or to a tier that holds a copy of it, as which it goes on and which takes no room there:
        ``ready[node_id]`` are those. ``room`` then does not count, and what is below does not move, unless it has to go
        because the node above it cannot go otherwise: to a copy of it where that node goes, or else by a drop.
        """
        plan = Plan(self.book, room or {}, ready)
        try:
            plan.relieve(int(tier), num_bytes)
        finally:
            plan.close()
        return plan.decisions()

    def refresh(self, costs: Costs) -> None:
        """Decide by these costs from now on. Every step is worked out anew: call it when they have really changed."""
        if isinstance(self.rule, CostReader):
            self.rule.read_costs(costs)
            self.book.rebuild()

    def rearrange(self, room: Mapping[Tier, int], budget: Budget, held: Collection[int] = ()) -> list[Decision]:
        """Moves that raise the total utility; see ``rearrange.rearrange``. None for a policy that has no utility."""
        return rearrange(self.book, self.rule, room, budget, held) if isinstance(self.rule, EvicPressRule) else []

    def explain(self, node_id: int, value_of_hit: float = 1.0) -> dict[str, object]:
        """See ``explain.explain``. KeyError for a node that is not in the book."""
        return explain(self.rule, self.book.records[node_id], value_of_hit)
