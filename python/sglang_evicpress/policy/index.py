"""The index of a policy: what it knows of every node, and per tier a heap of the next step of each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from sglang_evicpress.core import NodeStats
from sglang_evicpress.policy.base import DROPPED, Candidate, Entry, Policy, Preparer, Step, Watcher

_SLACK = 64


class NodeIndex:
    """All nodes and one heap per tier. A heap entry never lies above its candidate's present key, so the first entry
    that is up to date is the first step; outdated ones are dropped or put back when they come to the top."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._watcher = policy if isinstance(policy, Watcher) else None
        self.candidates: dict[int, Candidate] = {}
        self.heaps: list[list[Entry]] = [[] for _ in range(DROPPED)]
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
        falls = weight < candidate.weight or num_hits < candidate.num_hits
        is_used = candidate.last_use < last_use
        candidate.weight, candidate.num_hits, candidate.last_use = weight, num_hits, last_use
        if is_used and self._watcher is not None:
            self._watcher.used(candidate)
        gains = candidate.queued is not None and candidate.queued[0] <= 0.0  # then more weight makes the key smaller
        if falls or gains or not self.policy.rises_only:
            self.requeue(candidate)

    def lock(self, node_id: int, is_locked: bool) -> None:
        """A running request takes or gives back the node."""
        candidate = self.candidates[node_id]
        if candidate.is_locked != is_locked:
            self.locked_bytes[candidate.tier] += candidate.num_bytes if is_locked else -candidate.num_bytes
            candidate.is_locked = is_locked
            if not is_locked:
                self.requeue(candidate)

    def reweigh(self, weights: Mapping[int, float]) -> None:
        """Other weights for the nodes given, all at once."""
        for node_id, weight in weights.items():
            self.candidates[node_id].weight = weight
        self._refill()

    def rebuild(self) -> None:
        """Memos and heaps from scratch, after anything that changes many steps."""
        for candidate in self.candidates.values():
            candidate.memo = None
        if isinstance(self.policy, Preparer):
            self.policy.prepare(self.candidates.values())
        self._refill()

    def _refill(self) -> None:
        """Heaps from scratch; memos that are there still hold."""
        entries: list[list[Entry]] = [[] for _ in range(DROPPED)]
        step = self.policy.step
        for candidate in self.candidates.values():
            candidate.queued = None
            if not candidate.is_locked:
                next_step = step(candidate)
                if next_step is not None:
                    candidate.queued = (next_step.key, candidate.last_use, candidate.id)
                    entries[candidate.tier].append(candidate.queued)
        for heap in entries:
            heapq.heapify(heap)
        self.heaps = entries

    def requeue(self, candidate: Candidate, anew: bool = False) -> None:
        """Bring the candidate's entry up to date if its step comes earlier than noted; ``anew``: whenever it
        differs."""
        if candidate.is_locked:
            return
        next_step = self.policy.step(candidate)
        if next_step is None:
            if anew:
                candidate.queued = None
            return
        entry = (next_step.key, candidate.last_use, candidate.id)
        if candidate.queued is None or (entry != candidate.queued if anew else entry < candidate.queued):
            candidate.queued = entry
            heap = self.heaps[candidate.tier]
            heapq.heappush(heap, entry)
            if len(heap) > 2 * self.num_on[candidate.tier] + _SLACK:
                self._compact(candidate.tier)

    def first(self, tier: int) -> tuple[Candidate, Step] | None:
        """The unlocked node whose step on this tier comes first, and the step; its entry stays on top of the heap."""
        heap = self.heaps[tier]
        while heap:
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
        return None

    def _compact(self, tier: int) -> None:
        candidates = self.candidates
        heap = self.heaps[tier]
        heap[:] = [
            entry for entry in heap if (candidate := candidates.get(entry[2])) is not None and candidate.queued is entry
        ]
        heapq.heapify(heap)

    def parent(self, candidate: Candidate) -> Candidate | None:
        """None for a node below the root."""
        return None if candidate.parent_id is None else self.candidates.get(candidate.parent_id)

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
