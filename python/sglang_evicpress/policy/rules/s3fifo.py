"""Three queues, first in, first out: a small one for what is new, the main one, and what is known below."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.base import DROPPED, Candidate
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadePolicy

SMALL_SHARE = 0.1
"""Share of a tier's bytes that the small queue has (paper, section 4.1)."""

MOST_HITS = 3
"""Uses that are counted, in two bits."""

USES_TO_MAIN = 2
"""Uses after its arrival that bring a node into the main queue (paper, algorithm 1: ``freq > 1``)."""

GAIN = 8.0
"""A queue that wrongly lost a node is put back by so many times the ticks of a lap that the node stood for. At 4 as at
16 keys are worked out about five times for each node that leaves."""

BEHIND = 2.0**40
"""Ticks by which the main queue starts out behind the small one: more than there ever are."""


@dataclass(slots=True)
class _Place:
    """Place of a node in a queue of ``tier``: ``at``, in ticks, is when it came, or will have been put back last.

    ``num_uses`` counts since it came, ``num_hits`` and ``num_bytes`` are those it was last seen with.
    """

    tier: int
    at: float
    is_main: bool
    num_uses: int
    num_hits: int
    num_bytes: int


@dataclass(slots=True)
class _Queues:
    """Queues of one tier. ``small`` and ``main`` are added to ``at`` to make a key; ``hand`` is where the main one
    ends, None before it has had a node, ``lap`` the ticks from there to its head, 0 before it has lost one."""

    small: float = 0.0
    main: float = BEHIND
    small_bytes: int = 0
    num_bytes: int = 0
    hand: float | None = None
    lap: float = 0.0


class S3FifoPolicy(CascadePolicy):
    """S3-FIFO (Yang et al., SOSP 2023, section 4, algorithm 1).

    A node that is new to the cache joins the small queue. It leaves from there, to the ghosts, unless it was used twice
    or more: then it joins the main queue. So does a ghost that is used again. A node at the end of the main queue that
    was used goes back to its head, once for each of at most three uses, else it leaves. The small queue loses a node
    while it has a tenth of the bytes, else the main one does.

    As keys: the tick at which a node joined its queue, plus an offset of the queue. A use in the main queue adds the
    ticks that the queue takes to pass, its lap, as if the node had been put back already; at most three laps ahead. The
    offsets make the small queue keep its share: when a node leaves and the other queue should have lost one, the queue
    it left is put back. Offsets never fall, so keys only rise but for a node that changes queues, and each node is
    looked at again a few times, not at every plan. Within one plan they stand still, so that a large plan takes from
    both queues.

    What else differs: queues are counted in bytes, as nodes differ in size. A node joins the main queue at its second
    use, not when it gets to the end of the small one. Each tier has its queues; a node that goes down joins the same
    one there. Ghosts are the nodes that lower tiers still have: what was dropped is forgotten, with one tier there are
    none. A lap is that of the last node that left; before the first, a use puts a node back to now. Nodes that are
    locked or have children on their tier stay, and leave when they can. The upper part of a split node, and every node
    of an index that was built anew, counts as having come at its last use.
    """

    name: str = "s3fifo"

    def __init__(self, menu: Menu) -> None:
        super().__init__(menu)
        self._queues = [_Queues() for _ in Tier]
        self._places: dict[int, _Place] = {}
        self._newest = 0

    def small_share(self, tier: int) -> float:
        """Share of the bytes of a tier that its small queue has."""
        queues = self._queues[tier]
        return queues.small_bytes / max(1, queues.num_bytes)

    def key(self, candidate: Candidate) -> float:
        place, queues = self._places[candidate.id], self._queues[candidate.tier]
        # What a plan has moved will be the newest there.
        at = place.at if place.tier == candidate.tier else self._newest
        return at + (queues.main if place.is_main else queues.small)

    def used(self, candidate: Candidate) -> None:
        self._newest = max(self._newest, candidate.last_use)
        place = self._places.get(candidate.id)
        if place is None:
            is_main = candidate.num_hits > USES_TO_MAIN
            num_uses = min(candidate.num_hits - 1, MOST_HITS)
            place = _Place(candidate.tier, candidate.last_use, is_main, num_uses, candidate.num_hits, 0)
            self._places[candidate.id] = place
        else:
            is_used = candidate.num_hits > place.num_hits
            self._count(place, -1)
            if place.tier != candidate.tier:
                is_ghost = candidate.tier < place.tier and is_used
                place.tier, place.at, place.num_uses = candidate.tier, self._newest, 0
                place.is_main = place.is_main or is_ghost
            elif is_used:
                self._count_use(place)
        place.num_hits, place.num_bytes = candidate.num_hits, candidate.num_bytes
        self._count(place, 1)
        queues = self._queues[place.tier]
        if place.is_main and queues.lap == 0.0:
            queues.hand = place.at if queues.hand is None else min(queues.hand, place.at)

    def left(self, candidate: Candidate, tier: int) -> None:
        place = self._places[candidate.id]
        if tier > candidate.tier:
            self._put_back(place)
        if tier == DROPPED:
            self._count(place, -1)
            del self._places[candidate.id]

    def _count_use(self, place: _Place) -> None:
        place.num_uses += 1
        if place.is_main:
            lap = self._queues[place.tier].lap
            furthest = self._newest + MOST_HITS * lap
            place.at = max(place.at, min(place.at + lap, furthest) if lap else float(self._newest))
        elif place.num_uses >= USES_TO_MAIN:
            place.is_main, place.at = True, self._newest

    def _put_back(self, place: _Place) -> None:
        """A node leaves its queue downwards: put that back if the other one is to lose the next."""
        queues = self._queues[place.tier]
        age = max(1.0, self._newest - place.at)
        if place.is_main:
            queues.hand = place.at if queues.hand is None or queues.lap == 0.0 else max(queues.hand, place.at)
            queues.lap = age
        step = GAIN * max(age, queues.lap) * place.num_bytes / max(1, queues.num_bytes)
        small_bytes = queues.small_bytes - (0 if place.is_main else place.num_bytes)
        is_small_due = small_bytes >= SMALL_SHARE * (queues.num_bytes - place.num_bytes)
        if place.is_main and is_small_due:
            queues.main += step
        elif not (place.is_main or is_small_due or queues.hand is None):
            queues.small += max(step, queues.main + queues.hand - queues.small - place.at)

    def _count(self, place: _Place, sign: int) -> None:
        queues = self._queues[place.tier]
        queues.num_bytes += sign * place.num_bytes
        if not place.is_main:
            queues.small_bytes += sign * place.num_bytes
