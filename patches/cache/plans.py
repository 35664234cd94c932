"""The policy in use, as the parts of the tiers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sglang_evicpress.core import Decision, LowerCopy, Tier
from sglang_evicpress.policy.planner import Planner

MOST_PLANNED = 512  # nodes that one plan in the background may be about, on average: some milliseconds


class CurrentPlans:
    """Asks ``policy``, which is another one after a flush. ``ready``: what lower tiers have of nodes, by id."""

    def __init__(self, policy: Callable[[], Planner], ready: Mapping[int, Sequence[LowerCopy]]) -> None:
        self._policy = policy
        self._ready = ready

    def plan_without_copies(self, tier: Tier, num_bytes: int) -> Sequence[Decision]:
        """See ``Planner.plan``: of what lower tiers have already, and of drops."""
        return self._policy().plan(tier, num_bytes, lower_copies_of=self._ready)

    def held_bytes(self, tier: Tier) -> int:
        """Bytes that nodes hold on a tier."""
        return self._policy().index.num_bytes[tier]

    def num_nodes(self, tier: Tier) -> int:
        return self._policy().index.num_on[tier]

    def bounded(self, tier: Tier, num_bytes: int) -> int:
        """So many of the bytes as a plan about ``MOST_PLANNED`` nodes of common size frees."""
        return min(num_bytes, MOST_PLANNED * self.held_bytes(tier) // max(1, self.num_nodes(tier)))
