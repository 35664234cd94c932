"""Frequency times cost per byte, with an age that rises as nodes leave."""

from __future__ import annotations

import math

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.base import Candidate
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadePolicy


class GdsfPolicy(CascadePolicy):
    """Greedy-Dual-Size-Frequency (Cherkasova, HP Labs technical report HPL-98-69R1, 1998).

    The node with the smallest ``age + frequency * cost / size`` goes first. Cost is the seconds of prefilling the
    node again behind its prefix, size its bytes. A tier's age rises to the key of whatever leaves it downwards; a
    node keeps the age at which it came or was last used, so that old hits count for ever less. Ages change only when
    a node really leaves, never by planning: within one plan all nodes of a tier that were in it keep their keys.

    Simplified: cost is that of prefilling on every tier, not of loading from the tier below. A node without bytes
    frees nothing and goes last.
    """

    name: str = "gdsf"

    def __init__(self, menu: Menu, costs: CostSnapshot) -> None:
        super().__init__(menu)
        self.costs = costs
        self._ages = [0.0] * len(Tier)
        self._since: dict[int, tuple[int, float]] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    def read_costs(self, costs: CostSnapshot) -> None:
        """Take other costs; the index must be rebuilt after it."""
        self.costs = costs

    def key(self, candidate: Candidate) -> float:
        if not candidate.num_bytes:
            return math.inf
        tier, age = self._since[candidate.id]
        if tier != candidate.tier:  # a plan has moved it: it will come at the age of the tier it goes to
            age = self._ages[candidate.tier]
        cost_s = self.costs.prefill.marginal_seconds(candidate.num_tokens, candidate.depth_tokens)
        return age + max(1, candidate.num_hits) * cost_s / candidate.num_bytes

    def used(self, candidate: Candidate) -> None:
        """It came, was used, or stands on another parent: then it keeps its age."""
        uses = candidate.num_hits, candidate.last_use
        tier, _ = self._since.get(candidate.id, (None, 0.0))
        if tier != candidate.tier or uses > self._seen[candidate.id]:
            self._since[candidate.id] = candidate.tier, self._ages[candidate.tier]
        self._seen[candidate.id] = uses

    def left(self, candidate: Candidate, tier: int) -> None:
        if tier > candidate.tier and candidate.num_bytes:
            self._ages[candidate.tier] = max(self._ages[candidate.tier], self.key(candidate))
        del self._since[candidate.id], self._seen[candidate.id]
