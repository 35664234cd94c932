"""The last resort of a plan: which nodes go when nothing on a tier has a step left."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sglang_evicpress.core import LowerCopy
from sglang_evicpress.policy.base import DROPPED, Candidate

MOST_COMPARED = 16
"""Nodes, by last use, of which the one is dropped that loses least: the top of the tree costs all that is below it."""


class ForcedDrop(NamedTuple):
    """Fate of a node: it goes on as the copy ``lower_copy``, or, where there is none, it is dropped."""

    candidate: Candidate
    lower_copy: LowerCopy | None


class ForcedDrops:
    """Children of the nodes a plan knows of, and per tier their order of last use.

    A node has no step when a child keeps it on its tier and it cannot get smaller there: the tiers it could share with
    the child are full, or, in an urgent plan, hold no copy of it (``lower_copies_of``, see ``Plan``). Made once a plan
    needs it, O(n); after that a call costs what ``MOST_COMPARED`` nodes have below them.
    """

    def __init__(self, candidates: Iterable[Candidate], lower_copies_of: Mapping[int, Sequence[LowerCopy]]) -> None:
        self._lower_copies_of = lower_copies_of
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._by_use: list[list[tuple[int, int]]] = [[] for _ in range(DROPPED)]
        for candidate in candidates:
            if candidate.parent_id is not None:
                self._children[candidate.parent_id].append(candidate.id)
            if candidate.tier < DROPPED and not candidate.is_locked:
                self._by_use[candidate.tier].append((candidate.last_use, candidate.id))
        for heap in self._by_use:
            heapq.heapify(heap)

    def arrive(self, candidate: Candidate) -> None:
        """An unlocked node has come to its tier."""
        heapq.heappush(self._by_use[candidate.tier], (candidate.last_use, candidate.id))

    def next(self, tier: int, look: Callable[[int], Candidate]) -> list[ForcedDrop]:
        """Nodes that have to go, children first, for one node of the tier that holds bytes: all that is below it, and
        the node itself; but where a tier below holds a copy of the node, only the branches that begin above that tier,
        and of these what has a copy there as well goes on there. Nothing that is locked goes, nor what is above it. Of
        the nodes that were used least recently it is the one for which the fewest tokens are lost per byte, of equal
        ones the first. Empty: none is left on the tier.

        ``look`` gives a node as it is in the plan.
        """
        heap, seen = self._by_use[tier], list[tuple[int, int]]()
        best: list[ForcedDrop] = []
        least, chosen = 0.0, None
        while heap and len(seen) < MOST_COMPARED:
            entry = heapq.heappop(heap)
            root = look(entry[1])
            if root.tier != tier or not root.num_bytes:
                continue
            drops = self._drops_for(root, look)
            if any(one.candidate.is_locked for one in drops):
                continue
            seen.append(entry)
            per_byte = sum(one.candidate.num_tokens for one in drops if one.lower_copy is None) / root.num_bytes
            if not best or per_byte < least:
                best, least, chosen = drops, per_byte, entry
        for entry in seen:
            if entry != chosen:
                heapq.heappush(heap, entry)
        return best

    def _drops_for(self, root: Candidate, look: Callable[[int], Candidate]) -> list[ForcedDrop]:
        copies = self._lower_copies_of.get(root.id, ())
        lowest = max((copy.tier for copy in copies if copy.tier > root.tier), default=DROPPED)
        roots = [root.id]
        if lowest < DROPPED:
            roots = [child for child in self._children[root.id] if look(child).tier < lowest] or roots
        drops: list[ForcedDrop] = []
        going = [(node_id, True) for node_id in sorted(roots, reverse=True)]
        while going:
            node_id, may_stay = going.pop()
            candidate = look(node_id)
            if candidate.tier >= DROPPED or (may_stay and candidate.tier >= lowest):
                continue
            lower_copies = self._lower_copies_of.get(node_id, ()) if may_stay and node_id != root.id else ()
            lower_copy = next((lower_copy for lower_copy in lower_copies if lower_copy.tier == lowest), None)
            drops.append(ForcedDrop(candidate, lower_copy))
            going += [
                (child, lower_copy is not None) for child in sorted(self._children.get(node_id, ()), reverse=True)
            ]
        drops.reverse()
        return drops
