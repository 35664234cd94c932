"""First in, first out, but what was used since the hand last passed stays where it is for another lap."""

from __future__ import annotations

from typing import NamedTuple

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.base import DROPPED, Candidate
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadePolicy

LAP = 2.0**40
"""Weight of a lap in a key, above any tick. After 2**13 laps a key no longer tells neighbouring ticks apart: such nodes
go by last use."""


class _Place(NamedTuple):
    """Place of a node in the queue of ``tier``: the tick it came at, the lap that will take it, and its uses so far."""

    tier: int
    since: int
    lap: int
    num_hits: int


class SievePolicy(CascadePolicy):
    """SIEVE (Zhang et al., NSDI 2024, section 3).

    One queue in order of arrival and a hand that goes from the oldest node to the newest, then starts again. A node
    that was used since the hand last passed loses that mark and keeps its place; the first without one leaves, and
    there the hand stops. Nodes that arrive are ahead of the hand, but for one that has just taken the newest node: it
    starts again.

    As a key: (lap in which the hand takes the node, tick of its arrival). A node is taken the next time the hand comes,
    or, if it was used, the time after that. The hand of a tier is the greatest key of what left it downwards. So a use
    only raises a key, and nothing has to be done to nodes that the hand passes.

    Where the paper does not say: each tier has a queue and a hand of its own, and a node joins the queue when it comes
    to the tier. Sizes are not weighed, as in the paper. A node that cannot leave while the hand passes, because it is
    locked or its children are there, leaves as soon as it can. Uses are those that ``num_hits`` counts. The upper part
    of a split node, and every node of an index that was built anew, counts as having come at its last use.
    """

    name: str = "sieve"

    def __init__(self, menu: Menu) -> None:
        super().__init__(menu)
        self._hands = [(0, -1)] * len(Tier)  # (lap, tick) per tier
        self._heads = [-1] * len(Tier)  # the tick of the newest arrival per tier
        self._places: dict[int, _Place] = {}
        self._newest = 0

    def key(self, candidate: Candidate) -> float:
        place = self._places[candidate.id]
        if place.tier != candidate.tier:  # a plan has moved it: it will be the newest there
            place = self._arriving(candidate.tier, self._newest, 0, 0)
        return place.lap * LAP + place.since

    def used(self, candidate: Candidate) -> None:
        self._newest = max(self._newest, candidate.last_use)
        place, num_hits = self._places.get(candidate.id), candidate.num_hits
        if place is None:
            place = self._arriving(candidate.tier, candidate.last_use, int(num_hits > 1), num_hits)
        elif place.tier != candidate.tier:
            place = self._arriving(candidate.tier, self._newest, 0, num_hits)
        elif num_hits > place.num_hits:
            place = self._arriving(candidate.tier, place.since, 1, num_hits)
        self._heads[place.tier] = max(self._heads[place.tier], place.since)
        self._places[candidate.id] = place._replace(num_hits=num_hits)

    def left(self, candidate: Candidate, tier: int) -> None:
        place = self._places[candidate.id]
        if tier > candidate.tier:
            is_head = place.since == self._heads[place.tier]
            hand = (place.lap + 1, -1) if is_head else (place.lap, place.since)
            self._hands[place.tier] = max(self._hands[place.tier], hand)
        if tier == DROPPED:
            del self._places[candidate.id]

    def _arriving(self, tier: int, since: int, num_marks: int, num_hits: int) -> _Place:
        """The place of a node that the hand spares ``num_marks`` times from now on."""
        lap, passed = self._hands[tier]
        return _Place(tier, since, lap + (since <= passed) + num_marks, num_hits)
