"""The last resort of a plan: which nodes go when nothing on a tier has a step left."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sglang_evicpress.core import Way
from sglang_evicpress.policy.base import DROPPED, Record

MOST_COMPARED = 16
"""Nodes, by last use, of which the one is felled that loses least: the top of the tree costs all that is below it."""


class Felled(NamedTuple):
    """Fate of a node: it goes on as the copy ``way``, or, where there is none, it is dropped."""

    record: Record
    way: Way | None


class Felling:
    """Children of the nodes a plan knows of, and per tier their order of last use.

    A node has no step when a child keeps it on its tier and it cannot get smaller there: the tiers it could share with
    the child are full, or, in an urgent plan, hold no copy of it (``ready``, see ``Plan``). Made once a plan needs it,
    O(n); after that a call costs what ``MOST_COMPARED`` nodes have below them.
    """

    def __init__(self, records: Iterable[Record], ready: Mapping[int, Sequence[Way]]) -> None:
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

    def next(self, rank: int, look: Callable[[int], Record]) -> list[Felled]:
        """Nodes that have to go, children first, for one node of the tier that holds bytes: all that is below it, and
        the node itself; but where a tier below is ready for the node, only the branches that begin above that tier, and
        of these what is ready there as well goes on there. Nothing that is locked goes, nor what is above it. Of the
        nodes that were used least recently it is the one for which the fewest tokens are lost per byte, of equal ones
        the first. Empty: none is left on the tier.

        ``look`` gives a node as it is in the plan.
        """
        heap, seen = self._by_use[rank], list[tuple[int, int]]()
        best: list[Felled] = []
        least, chosen = 0.0, None
        while heap and len(seen) < MOST_COMPARED:
            entry = heapq.heappop(heap)
            root = look(entry[1])
            if root.rank != rank or not root.num_bytes:
                continue
            felled = self._felled_for(root, look)
            if any(one.record.is_locked for one in felled):
                continue
            seen.append(entry)
            per_byte = sum(one.record.num_tokens for one in felled if one.way is None) / root.num_bytes
            if not best or per_byte < least:
                best, least, chosen = felled, per_byte, entry
        for entry in seen:
            if entry != chosen:
                heapq.heappush(heap, entry)
        return best

    def _felled_for(self, root: Record, look: Callable[[int], Record]) -> list[Felled]:
        lowest, roots = self._lowest_ready(root), [root.id]
        if lowest < DROPPED:
            roots = [child for child in self._children[root.id] if look(child).rank < lowest] or roots
        felled: list[Felled] = []
        going = [(node_id, True) for node_id in sorted(roots, reverse=True)]
        while going:
            node_id, may_stay = going.pop()
            record = look(node_id)
            if record.rank >= DROPPED or (may_stay and record.rank >= lowest):
                continue
            ways = self._ready.get(node_id, ()) if may_stay and node_id != root.id else ()
            way = next((way for way in ways if way.rank == lowest), None)
            felled.append(Felled(record, way))
            going += [(child, way is not None) for child in sorted(self._children.get(node_id, ()), reverse=True)]
        felled.reverse()
        return felled

    def _lowest_ready(self, record: Record) -> int:
        return max((way.rank for way in self._ready.get(record.id, ()) if way.rank > record.rank), default=DROPPED)
