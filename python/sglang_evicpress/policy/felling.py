"""The last resort of a plan: which nodes go when nothing on a tier has a step left."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sglang_evicpress.core import Tier, Way
from sglang_evicpress.policy.book import DROPPED, Record


class Felling:
    """Who is below whom, and per tier who was used least recently, of the nodes a plan knows of.

    A node has no step when a child keeps it on its tier and it cannot get smaller there: the tiers it could share with
    the child are full, or, in an urgent plan, hold no copy of it (``ready``, see ``Plan``). Made once a plan needs it,
    O(n); after that a call costs what it fells.
    """

    def __init__(self, records: Iterable[Record], tiers: Sequence[Tier], ready: Mapping[int, Sequence[Way]]) -> None:
        self._tiers = tiers
        self._ready = ready
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._by_use: list[list[tuple[int, int]]] = [[] for _ in range(DROPPED)]
        for record in records:
            if record.parent_id is not None:
                self._children[record.parent_id].append(record.id)
            if record.rank < DROPPED and not record.is_locked:
                self._by_use[record.rank].append((record.last_use, record.id))
        for heap in self._by_use:
            heapq.heapify(heap)

    def arrive(self, record: Record) -> None:
        """An unlocked node has come to its tier."""
        heapq.heappush(self._by_use[record.rank], (record.last_use, record.id))

    def next(self, rank: int, look: Callable[[int], Record]) -> list[Record]:
        """What to drop, children first, for the node of the tier that was used least recently and holds bytes there:
        all that is below it, and the node itself; but where a tier below is ready for it, only the branches that begin
        above that tier. Nothing that is locked goes, nor what is above it. Empty: none is left on the tier.

        ``look`` gives a node as it is in the plan.
        """
        heap = self._by_use[rank]
        while heap:
            root = look(heapq.heappop(heap)[1])
            if root.rank != rank or not root.num_bytes:
                continue
            lowest, roots = self._lowest_ready(root), [root.id]
            if lowest < DROPPED:
                roots = [child for child in self._children[root.id] if look(child).rank < lowest] or roots
            felled = [record for node_id in self._below(roots) if (record := look(node_id)).rank < DROPPED]
            if not any(record.is_locked for record in felled):
                return felled
        return []

    def _lowest_ready(self, record: Record) -> int:
        return max((way.rank for way in self._ready.get(record.id, ()) if way.rank > record.rank), default=DROPPED)

    def _below(self, roots: list[int]) -> list[int]:
        """The nodes given and all below them, children first, in the same order in every process."""
        found = sorted(roots)
        for node_id in found:
            found += sorted(self._children.get(node_id, ()))
        found.reverse()
        return found
