"""The policy in use, as the parts of the tiers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sglang_evicpress.core import Decision, Tier, Way
from sglang_evicpress.policy.planner import Policy

MOST_PLANNED = 512  # nodes that one plan in the background may be about, on average: some milliseconds


class CurrentPlans:
    """Asks ``policy``, which is another one after a flush. ``ready``: what lower tiers have of nodes, by id."""

    def __init__(self, policy: Callable[[], Policy], ready: Mapping[int, Sequence[Way]]) -> None:
        self._policy = policy
        self._ready = ready

    def plan_without_copies(self, tier: Tier, num_bytes: int) -> Sequence[Decision]:
        """See ``Policy.plan``: of what lower tiers have already, and of drops."""
        return self._policy().plan(tier, num_bytes, ready=self._ready)

    def held_bytes(self, tier: Tier) -> int:
        """Bytes that nodes hold on a tier."""
        return self._policy().book.num_bytes[tier]

    def num_nodes(self, tier: Tier) -> int:
        return self._policy().book.num_on[tier]

    def bounded(self, tier: Tier, num_bytes: int) -> int:
        """So many of the bytes as a plan about ``MOST_PLANNED`` nodes of common size frees."""
        return min(num_bytes, MOST_PLANNED * self.held_bytes(tier) // max(1, self.num_nodes(tier)))
