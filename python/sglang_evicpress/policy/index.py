"""The index of a policy: what it knows of every node, and per tier a heap of the next step of each."""

from __future__ import annotations

import heapq
import math

from sglang_evicpress.core import NodeStats
from sglang_evicpress.policy.base import DROPPED, Candidate, Entry, Policy, Preparer, Step, Watcher

_SLACK = 64

SMALL = 256
"""Nodes, of which all are swept at once: as many as one looks at anyhow."""

MOVES_PER_LOOK = 1
"""Entries that each look for a first step sweeps where keys may have fallen, or where so many came before that some are
left, so that what it finds is the best of ever more nodes."""

MOST_LOOKED = 256
"""Nodes whose keys rose without a word, of which one look puts so many back; then the others are swept."""

MOST_PASSED = 2048
"""Entries set aside that come before the first of the others, of which the looks of one plan sweep so many: most are
outdated."""

MOST_CLEARED = 4
"""Entries, outdated on top of a heap or set aside in order, that are swept whenever one is added."""

FIRST_SWEPT = 64
"""Entries of a tier that are swept at once when a sweep begins."""

PREPARED = 32
"""Nodes from which on a policy is asked for many steps at a time."""


class NodeIndex:
    """All nodes and one heap per tier. A heap entry never lies above its candidate's present key, so the first entry
    that is up to date is the first step; outdated ones are dropped or put back when they come to the top.

    Where keys may have fallen without a word, as other costs make them, that does not hold: then all entries are set
    aside and swept, those that came first before them. ``advance`` sweeps so many of them, each look for a first step
    ``MOVES_PER_LOOK``; of what was not swept yet no step is found. No call takes longer than a number of nodes that
    does not grow with the tree, but trees of ``SMALL`` nodes are swept at once.

    A hit queues a node anew, so that what was hit most is never found by an old entry. The outdated entries that this
    leaves are set aside too, once they are many; these keep their order, so that a look first sweeps what came before.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._watcher = policy if isinstance(policy, Watcher) else None
        self.candidates: dict[int, Candidate] = {}
        self.heaps: list[list[Entry]] = [[] for _ in range(DROPPED)]
        self._aside: list[list[list[Entry]]] = [[] for _ in range(DROPPED)]  # per tier, a heap of heaps
        self._num_aside = [0] * DROPPED
        self._is_ordered = [True] * DROPPED  # by present keys: what was set aside is there for outdated entries alone
        self.num_passed = 0
        """Entries that the looks of a plan have swept out of turn."""
        self.num_bytes = [0] * DROPPED
        self.num_on = [0] * DROPPED
        self.locked_bytes = [0] * DROPPED

    def add(self, node: NodeStats) -> None:
        """Note a new node, or whatever has changed about a known one. ValueError for a weight that is no number."""
        if not math.isfinite(node.weight):
            raise ValueError(f"node {node.id} has the weight {node.weight!r}: expected a finite number")
        candidate = self.candidates.get(node.id)
        if candidate is None:
            candidate = self.candidates[node.id] = Candidate(node)
            self._place(candidate, 1)
        elif candidate.parent_id == node.parent_id and candidate.tier == node.tier:
            is_used = candidate.last_use < node.last_use
            self._count(candidate, -1)
            candidate.read(node)
            self._count(candidate, 1)
            if is_used and self._watcher is not None:
                self._watcher.used(candidate)
            self.requeue(candidate, anew=True)
            return
        else:
            if candidate.tier != node.tier and self._watcher is not None:
                self._watcher.left(candidate, int(node.tier))
            former = self.parent(candidate)
            self._place(candidate, -1)
            candidate.read(node)
            self._place(candidate, 1)
            if former is not None and candidate.parent_id != former.id:
                self.requeue(former, anew=True)
        if self._watcher is not None:
            self._watcher.used(candidate)
        self._requeue_parent(candidate)
        self.requeue(candidate, anew=True)

    def remove(self, node_id: int) -> None:
        """The node is dropped. It must have no children in the index. KeyError when it is not known."""
        candidate = self.candidates[node_id]
        if candidate.lowest_tier < DROPPED:
            raise ValueError(f"node {node_id} has children: expected them to be dropped first")
        if self._watcher is not None:
            self._watcher.left(candidate, DROPPED)
        self._place(candidate, -1)
        del self.candidates[node_id]
        self._requeue_parent(candidate)

    def touch(self, node_id: int, weight: float, num_hits: int, last_use: int) -> None:
        """The node was used, or is about to be, or no longer is."""
        candidate = self.candidates[node_id]
        is_used = candidate.last_use < last_use
        candidate.weight, candidate.num_hits, candidate.last_use = weight, num_hits, last_use
        if is_used and self._watcher is not None:
            self._watcher.used(candidate)
        self.requeue(candidate, anew=True)

    def lock(self, node_id: int, is_locked: bool) -> None:
        """A running request takes or gives back the node."""
        candidate = self.candidates[node_id]
        if candidate.is_locked != is_locked:
            self.locked_bytes[candidate.tier] += candidate.num_bytes if is_locked else -candidate.num_bytes
            candidate.is_locked = is_locked
            if not is_locked:
                self.requeue(candidate, anew=True)

    def rebuild(self) -> None:
        """Begin to work out every step anew, after anything that changes many: memos are outdated."""
        if isinstance(self.policy, Preparer):
            self.policy.forget_steps()
        self.begin_sweep()

    # ---- the sweep

    def begin_sweep(self) -> None:
        """Keys may be others than the entries say; what memos say still holds."""
        is_small = len(self.candidates) <= SMALL
        for tier in range(DROPPED):
            self._set_aside(tier)
            self._is_ordered[tier] = not self._aside[tier]
            self._sweep(tier, self._num_aside[tier] if is_small else FIRST_SWEPT)

    @property
    def is_sweeping(self) -> bool:
        """True until ``advance`` has come to the end of what was set aside."""
        return any(self._aside)

    def advance(self, max_nodes: int) -> int:
        """Sweep so many entries, those first that came first before; returns how many there were."""
        num_left = max_nodes
        for tier in range(DROPPED):
            while self._aside[tier] and num_left > 0:
                num_left -= self._sweep(tier, num_left)
        return max_nodes - num_left

    def finish(self) -> None:
        """End the sweep."""
        self.advance(sum(self._num_aside))

    def _set_aside(self, tier: int) -> None:
        """All entries of a tier are to be swept."""
        if self.heaps[tier]:
            heapq.heappush(self._aside[tier], self.heaps[tier])  # heaps compare by their first entries
            self._num_aside[tier] += len(self.heaps[tier])
            self.heaps[tier] = []

    def _sweep(self, tier: int, max_entries: int) -> int:
        """Queue the nodes of the first entries that were set aside anew; returns how many entries that were."""
        aside, batch, entries, num_swept = self._aside[tier], list[Candidate](), list[Entry](), 0
        while aside and num_swept < max_entries:
            entry = heapq.heappop(aside[0])
            heapq.heapreplace(aside, aside[0]) if aside[0] else heapq.heappop(aside)
            num_swept += 1
            candidate = self.candidates.get(entry[2])
            if candidate is not None and candidate.queued is entry:
                candidate.queued = None
                batch.append(candidate)
                entries.append(entry)
        self._num_aside[tier] -= num_swept
        heap, is_ordered = self.heaps[tier], self._is_ordered[tier]
        self._is_ordered[tier] = is_ordered or not aside
        if is_ordered:
            for candidate, entry in zip(batch, entries, strict=True):
                candidate.queued = entry
                heapq.heappush(heap, entry)
            return num_swept
        if len(batch) >= PREPARED and isinstance(self.policy, Preparer):
            self.policy.prepare(batch)
        for candidate in batch:
            next_step = None if candidate.is_locked else self.policy.step(candidate)
            if next_step is not None:
                candidate.queued = (next_step.key, candidate.last_use, candidate.id)
                heapq.heappush(heap, candidate.queued)
        return num_swept

    # ---- order

    def requeue(self, candidate: Candidate, anew: bool = False) -> None:
        """Bring the candidate's entry up to date if its step comes earlier than noted; ``anew``: whenever it
        differs."""
        if candidate.is_locked:
            return
        tier = candidate.tier
        anew = anew or bool(self._aside[tier])
        next_step = self.policy.step(candidate)
        if next_step is None:
            if anew:
                candidate.queued = None
            return
        entry = (next_step.key, candidate.last_use, candidate.id)
        if candidate.queued is None or (entry != candidate.queued if anew else entry < candidate.queued):
            candidate.queued = entry
            heapq.heappush(self.heaps[tier], entry)
            self._clear_top(self.heaps[tier])
            self._tidy(tier)

    def first(self, tier: int) -> tuple[Candidate, Step] | None:
        """The unlocked node whose step on this tier comes first, and the step; its entry stays on top of the heap."""
        heap, aside = self.heaps[tier], self._aside[tier]
        if aside and (not self._is_ordered[tier] or self.num_passed >= MOST_PASSED):
            self._sweep(tier, MOVES_PER_LOOK)
        looked: list[Entry] = []
        while heap or aside:
            if not heap:
                self._sweep(tier, FIRST_SWEPT)
                continue
            if aside and self._is_ordered[tier] and self.num_passed < MOST_PASSED and aside[0][0] < heap[0]:
                self.num_passed += self._sweep(tier, FIRST_SWEPT)
                continue
            entry = heap[0]
            candidate = self.candidates.get(entry[2])
            if candidate is None or candidate.queued is not entry:
                heapq.heappop(heap)
                continue
            next_step = None if candidate.is_locked else self.policy.step(candidate)
            if next_step is None:
                candidate.queued = None
                heapq.heappop(heap)
                continue
            now = (next_step.key, candidate.last_use, candidate.id)
            if now == entry:
                return candidate, next_step
            candidate.queued = now
            heapq.heapreplace(heap, now)
            looked.append(now)
            if len(looked) == MOST_LOOKED:
                self._keep_only(tier, looked)
                heap = self.heaps[tier]
        return None

    def _keep_only(self, tier: int, entries: list[Entry]) -> None:
        """Leave these in the heap and set the others aside, which may have been hit as well."""
        self._set_aside(tier)
        for key, last_use, node_id in entries:
            candidate = self.candidates[node_id]
            candidate.queued = (key, last_use, node_id)
            self.heaps[tier].append(candidate.queued)
        heapq.heapify(self.heaps[tier])

    def _clear_top(self, heap: list[Entry]) -> None:
        for _ in range(MOST_CLEARED):
            candidate = self.candidates.get(heap[0][2])
            if candidate is not None and candidate.queued is heap[0]:
                return
            heapq.heappop(heap)  # never the last: the entry that was added is up to date

    def _tidy(self, tier: int) -> None:
        """Sweep a heap most entries of which are outdated, at the cost of whoever makes more of them."""
        most = 2 * self.num_on[tier] + _SLACK
        if len(self.heaps[tier]) > most:
            self._set_aside(tier)
        if self._num_aside[tier] > most:
            self._sweep(tier, self._num_aside[tier] if most <= SMALL else 2 * MOVES_PER_LOOK)
        elif self._aside[tier] and self._is_ordered[tier]:
            self._sweep(tier, MOST_CLEARED)

    def parent(self, candidate: Candidate) -> Candidate | None:
        """None for a node below the root."""
        parent_id = candidate.parent_id
        return None if parent_id is None or parent_id not in self.candidates else self.candidates[parent_id]

    def _requeue_parent(self, candidate: Candidate) -> None:
        if (parent := self.parent(candidate)) is not None:
            self.requeue(parent, anew=True)

    def _place(self, candidate: Candidate, sign: int) -> None:
        """The candidate comes to its tier and parent (1), or leaves them (-1)."""
        self._count(candidate, sign)
        candidate.queued = None
        if (parent := self.parent(candidate)) is not None:
            parent.count_child(candidate.tier, sign)

    def _count(self, candidate: Candidate, sign: int) -> None:
        self.num_on[candidate.tier] += sign
        self.num_bytes[candidate.tier] += sign * candidate.num_bytes
        if candidate.is_locked:
            self.locked_bytes[candidate.tier] += sign * candidate.num_bytes
