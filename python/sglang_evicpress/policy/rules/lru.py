"""Policies that only choose the victim: the form stays, the node goes one tier down or is dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_evicpress.core import LowerCopy
from sglang_evicpress.policy.base import DROPPED, Candidate, Step, lower_bytes
from sglang_evicpress.policy.menu import Menu


class CascadePolicy:
    """A node goes to the next tier below that can take it, as it is; from the last one it is dropped."""

    compresses: bool = False
    weighs_quality: bool = False

    def __init__(self, menu: Menu) -> None:
        self.menu = menu

    def key(self, candidate: Candidate) -> float:
        """The smallest goes first, ties by last use; here the last use itself."""
        return float(candidate.last_use)

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        tier = self.next_tier(candidate, excluded_tiers)
        if tier is None:
            return None
        if tier == DROPPED:
            return Step(self.key(candidate), DROPPED, None, 0)
        if lower_copies is not None:
            lower_copy = next(lower_copy for lower_copy in lower_copies if lower_copy.tier == tier)
            return Step(self.key(candidate), tier, lower_copy.form, lower_copy.num_bytes, lower_copy.quality)
        return Step(self.key(candidate), tier, None, lower_bytes(self.menu, candidate), candidate.quality)

    def next_tier(self, candidate: Candidate, excluded_tiers: int) -> int | None:
        """The tier below that can take the node, DROPPED if none is left, None while a child is above that."""
        lowest_tier = candidate.lowest_tier
        if lowest_tier <= candidate.tier:
            return None
        for tier in self.menu.tiers:
            if tier > candidate.tier and not excluded_tiers >> tier & 1:
                return int(tier) if tier <= lowest_tier else None
        return DROPPED if lowest_tier == DROPPED else None

    def delay_s(self, candidate: Candidate) -> float:
        return 0.0


class LruPolicy(CascadePolicy):
    """Least recently used first, as SGLang's own radix cache."""

    name: str = "lru"


class LfuPolicy(CascadePolicy):
    """Least frequently used first, then least recently (SGLang's ``lfu``)."""

    name: str = "lfu"

    def key(self, candidate: Candidate) -> float:
        return float(candidate.num_hits)


class SlruPolicy(CascadePolicy):
    """Nodes used once before those used at least ``threshold`` times, each by last use (SGLang's ``slru``)."""

    name: str = "slru"

    def __init__(self, menu: Menu, threshold: int = 2) -> None:
        super().__init__(menu)
        self.threshold = threshold

    def key(self, candidate: Candidate) -> float:
        return float(candidate.num_hits >= self.threshold)


class HptPolicy(CascadePolicy):
    """Fewest hits per token first, then least recently used (``hpt``, proposed in sglang pull request 30300).

    The pull request is open and its arithmetic may change: the plain quotient of its name is used, over the logical
    tokens of the node, with nothing that lets old hits fade.
    """

    name: str = "hpt"

    def key(self, candidate: Candidate) -> float:
        return candidate.num_hits / max(1, candidate.num_tokens)


class BeladyPolicy(CascadePolicy):
    """The node whose next use is farthest away goes first (Belady, IBM Systems Journal 5(2), 1966).

    ``next_use`` maps a node to the time of its next use, in any unit; whoever knows the future keeps it up to date,
    for a node before the policy is told of its use. A node that is not in it is never used again. Optimal only for
    nodes of one size and cost in one tier: neither sizes nor delays are weighed.
    """

    name: str = "belady"

    def __init__(self, menu: Menu, next_use: Mapping[int, float]) -> None:
        super().__init__(menu)
        self.next_use = next_use

    def key(self, candidate: Candidate) -> float:
        return -self.next_use.get(candidate.id, math.inf)
