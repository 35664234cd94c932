"""The book of a policy: what it knows of every node, and per tier a heap of the next step of each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from sglang_evicpress.core import NodeStats
from sglang_evicpress.policy.base import DROPPED, Entry, Preparer, Record, Rule, Step, Watcher

_SLACK = 64


class Book:
    """All nodes and one heap per tier. A heap entry never lies above its record's present key, so the first entry
    that is up to date is the first step; outdated ones are dropped or put back when they come to the top."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._watcher = rule if isinstance(rule, Watcher) else None
        self.records: dict[int, Record] = {}
        self.heaps: list[list[Entry]] = [[] for _ in range(DROPPED)]
        self.num_bytes = [0] * DROPPED
        self.num_on = [0] * DROPPED
        self.locked_bytes = [0] * DROPPED

    def put(self, node: NodeStats) -> None:
        """Note a new node, or whatever has changed about a known one. ValueError for a weight that is no number."""
        if not math.isfinite(node.weight):
            raise ValueError(f"node {node.id} has the weight {node.weight!r}: expected a finite number")
        record = self.records.get(node.id)
        if record is None:
            record = self.records[node.id] = Record(node)
            self._join(record)
        elif record.parent_id == node.parent_id and record.rank == node.tier:
            is_used = record.last_use < node.last_use
            self._count(record, -1)
            record.read(node)
            self._count(record, 1)
            if is_used and self._watcher is not None:
                self._watcher.used(record)
            self.requeue(record, anew=True)
            return
        else:
            if record.rank != node.tier and self._watcher is not None:
                self._watcher.left(record, int(node.tier))
            former = self._parent(record)
            self._leave(record)
            record.read(node)
            self._join(record)
            if former is not None and record.parent_id != former.id:
                self.requeue(former, anew=True)
        if self._watcher is not None:
            self._watcher.used(record)
        parent = self._parent(record)
        if parent is not None:
            self.requeue(parent, anew=True)
        self.requeue(record, anew=True)

    def forget(self, node_id: int) -> None:
        """The node is dropped. It must have no children in the book. KeyError when it is not known."""
        record = self.records[node_id]
        if record.floor < DROPPED:
            raise ValueError(f"node {node_id} has children: expected them to be dropped first")
        if self._watcher is not None:
            self._watcher.left(record, DROPPED)
        self._leave(record)
        del self.records[node_id]
        parent = self._parent(record)
        if parent is not None:
            self.requeue(parent, anew=True)

    def touch(self, node_id: int, weight: float, num_hits: int, last_use: int) -> None:
        """The node was used, or is about to be, or no longer is."""
        record = self.records[node_id]
        falls = weight < record.weight or num_hits < record.num_hits
        is_used = record.last_use < last_use
        record.weight, record.num_hits, record.last_use = weight, num_hits, last_use
        if is_used and self._watcher is not None:
            self._watcher.used(record)
        gains = record.queued is not None and record.queued[0] < 0.0  # then more weight makes the key smaller
        if falls or gains or not self.rule.rises_only:
            self.requeue(record)

    def lock(self, node_id: int, is_locked: bool) -> None:
        """A running request takes or gives back the node."""
        record = self.records[node_id]
        if record.is_locked != is_locked:
            self.locked_bytes[record.rank] += record.num_bytes if is_locked else -record.num_bytes
            record.is_locked = is_locked
            if not is_locked:
                self.requeue(record)

    def reweigh(self, weights: Mapping[int, float]) -> None:
        """Other weights for the nodes given, all at once: the reuse clock has another epoch or half-life."""
        for node_id, weight in weights.items():
            self.records[node_id].weight = weight
        self._refill()

    def rebuild(self) -> None:
        """Memos and heaps from scratch, after anything that changes many steps."""
        for record in self.records.values():
            record.memo = None
        if isinstance(self.rule, Preparer):
            self.rule.prepare(self.records.values())
        self._refill()

    def _refill(self) -> None:
        """Heaps from scratch; memos that are there still hold."""
        entries: list[list[Entry]] = [[] for _ in range(DROPPED)]
        step = self.rule.step
        for record in self.records.values():
            record.queued = None
            if not record.is_locked:
                found = step(record)
                if found is not None:
                    record.queued = (found.key, record.last_use, record.id)
                    entries[record.rank].append(record.queued)
        for heap in entries:
            heapq.heapify(heap)
        self.heaps = entries

    def requeue(self, record: Record, anew: bool = False) -> None:
        """Bring the record's entry up to date if its step comes earlier than noted; ``anew``: whenever it differs."""
        if record.is_locked:
            return
        found = self.rule.step(record)
        if found is None:
            if anew:
                record.queued = None
            return
        entry = (found.key, record.last_use, record.id)
        if record.queued is None or (entry != record.queued if anew else entry < record.queued):
            record.queued = entry
            heap = self.heaps[record.rank]
            heapq.heappush(heap, entry)
            if len(heap) > 2 * self.num_on[record.rank] + _SLACK:
                self._compact(record.rank)

    def first(self, rank: int) -> tuple[Record, Step] | None:
        """The unlocked node whose step on this tier comes first, and the step; its entry stays on top of the heap."""
        heap = self.heaps[rank]
        while heap:
            entry = heap[0]
            record = self.records.get(entry[2])
            if record is None or record.queued is not entry:
                heapq.heappop(heap)
                continue
            found = None if record.is_locked else self.rule.step(record)
            if found is None:
                record.queued = None
                heapq.heappop(heap)
                continue
            now = (found.key, record.last_use, record.id)
            if now == entry:
                return record, found
            record.queued = now
            heapq.heapreplace(heap, now)
        return None

    def _compact(self, rank: int) -> None:
        records = self.records
        heap = self.heaps[rank]
        heap[:] = [entry for entry in heap if (record := records.get(entry[2])) is not None and record.queued is entry]
        heapq.heapify(heap)

    def _parent(self, record: Record) -> Record | None:
        return None if record.parent_id is None else self.records.get(record.parent_id)

    def _join(self, record: Record) -> None:
        self._count(record, 1)
        parent = self._parent(record)
        if parent is not None:
            parent.count_child(record.rank, 1)

    def _leave(self, record: Record) -> None:
        self._count(record, -1)
        record.queued = None
        parent = self._parent(record)
        if parent is not None:
            parent.count_child(record.rank, -1)

    def _count(self, record: Record, sign: int) -> None:
        self.num_on[record.rank] += sign
        self.num_bytes[record.rank] += sign * record.num_bytes
        if record.is_locked:
            self.locked_bytes[record.rank] += sign * record.num_bytes
