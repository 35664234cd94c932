"""Copying what nodes hold on the GPU to the host, ahead of need or at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import Copies, HostMemory, Removals, Runs, SsdWrites, Tiers
from sglang_evicpress.patches.tree.node import has_child_on_gpu, size_of, slots_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.entry.encoding import Extent
from sglang_evicpress.tiers.jobs import Job


class Streams(Protocol):
    """Order of what is queued on the device."""

    def written_event(self) -> torch.cuda.Event | None:
        """An event behind all that was launched until now."""

    def ahead_of_next_pass(self) -> AbstractContextManager[None]:
        """Put all that is queued within before whatever is written to the pool next."""


class Backup:
    """Begins copies to the host. ``is_arriving``: a load still brings what a node is to hold. ``counts`` and
    ``seconds`` are those of evictions, in which copies are made at once."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        storage: Tiers,
        placement: Copies,
        removal: Removals,
        room: HostMemory,
        ssd: SsdWrites,
        streams: Streams,
        is_arriving: Callable[[Node], bool],
        counts: Counter[str],
        seconds: MutableMapping[str, float],
    ) -> None:
        self.nodes = nodes
        self.storage = storage
        self.placement = placement
        self.removal = removal
        self.room = room
        self.ssd = ssd
        self.streams = streams
        self._is_arriving = is_arriving
        self._counts = counts
        self._seconds = seconds

    def backup_parent(self, node: Node) -> None:
        """A node that is not on the GPU holds its parent there until that has a copy: see that it gets one."""
        parent = node.parent
        is_held = parent.parent is not None and parent.value is not None
        if is_held and not parent.kv.copies and parent.kv.job is None:
            self.start_copy(parent, Tier.HOST, is_modest=True)

    def start_copy(
        self,
        node: Node,
        tier: Tier,
        keep: Collection[int] = (),
        *,
        keeps_planned: bool = False,
        is_modest: bool = False,
    ) -> bool:
        """Begin to copy what a node holds to a lower tier. False when there is no room or no budget for it; the spare
        copies of the nodes ``keep`` (few), and with ``keeps_planned`` of those that are to leave the GPU soon, do not
        make room, and nothing does for a modest copy."""
        if not node.kv.is_text:
            return False  # no entry can say what it is of
        if node.value is None:
            copy = node.kv.copies.get(Tier.HOST)
            return copy is not None and tier == Tier.SSD and self.ssd.start_write(copy.entry)
        if self.placement.has_same(node, Tier.HOST):
            return tier == Tier.SSD and self.ssd.start_write(node.kv.copies[Tier.HOST].entry)
        if self._is_arriving(node):
            return False  # its slots do not hold it yet
        if node.kv.job is not None or self.room.is_busy:
            return False
        num_bytes = self._num_bytes(node)
        if is_modest:
            runs = self.room.free_room(num_bytes)
        else:
            runs = self.room.host_room(num_bytes, keep=keep, keeps_planned=keeps_planned)
        if runs is None:
            self.room.want(num_bytes)
            self.storage.counts["copies_without_room"] += 1
            return False
        with self.room.given_back_after_an_error(runs):
            BackupJob(self, node, runs, goes_on=tier == Tier.SSD).start()
        return True

    def leave_by_copy(self, node: Node, tier: Tier) -> bool:
        """Begin to copy a node to a lower tier; it leaves its own when it is there. Whether it was begun."""
        job = node.kv.job
        if isinstance(job, BackupJob) and job.version == node.kv.version:  # it is copied ahead right now
            job.goes_on = job.goes_on or tier == Tier.SSD
            node.kv.is_leaving = True
            return True
        node.kv.is_leaving, is_begun = True, False  # before: the copy may be there at once
        try:
            is_begun = self.start_copy(node, tier, keep=(node.id,))
        finally:
            node.kv.is_leaving = node.kv.is_leaving and is_begun
        return is_begun

    def copy_at_once(self, node: Node) -> bool:
        """Copy what a node holds to the host, so that its slots may be freed; whether that is so. On a device the copy
        is only queued. One that is on its way already is not waited for."""
        if not node.kv.is_text:
            return False
        if self.placement.has_same(node, Tier.HOST):
            return True
        num_bytes = self._num_bytes(node)
        runs = self.room.host_room(num_bytes, keep=(node.id,))
        if runs is None:
            self.room.want(num_bytes)
            self._counts["copies_without_room"] += 1
            return False
        begin = time.perf_counter()
        with self.room.given_back_after_an_error(runs):
            BackupJob(self, node, runs, goes_on=False).begin_here()
        self._counts["copies"] += 1
        self._counts["copied_bytes"] += num_bytes
        self._seconds["copying"] += time.perf_counter() - begin
        return self.placement.has_same(node, Tier.HOST)

    def _num_bytes(self, node: Node) -> int:
        return max(1, sum(self.storage.copier.sizes(size_of(node), node.kv.layout is not None)))  # or all are holes


class BackupJob(Job):
    """Copies what a resident node holds to the host. What the node holds when it is done must be what it held."""

    def __init__(self, owner: Backup, node: Node, runs: Runs, *, goes_on: bool) -> None:
        super().__init__()
        kv = node.kv
        self.owner, self.node_id, self.version, self.goes_on = owner, node.id, kv.version, goes_on
        self.form, self.layout, self.origin = kv.form, kv.layout, kv.origin
        self.slots = slots_of(node).clone()
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.after = owner.streams.written_event()
        self.entry = HostEntry(owner.placement.header_of(node), runs)
        self.end_saving: Callable[[], tuple[Extent, ...]] | None = None

    def start(self) -> None:
        owner = self.owner
        owner.storage.submit("copy", self)  # first: where it fails nothing has changed
        owner.nodes[self.node_id].kv.job = self
        owner.room.begin_copy(self.num_bytes)
        owner.storage.host.pin(self.entry)

    def begin_here(self) -> None:
        """Begin on this thread, behind all that was launched and before whatever overwrites the node's slots: they may
        be freed at once. The node has the copy from now on; until it is there nobody can load it. On the CPU it is
        there."""
        owner, node = self.owner, self.owner.nodes[self.node_id]
        copier, host = owner.storage.copier, owner.storage.host
        with owner.streams.ahead_of_next_pass():
            self.end_saving = copier.begin_save(self.slots, self.layout, host.arena, self.entry.runs)
        owner.room.begin_copy(self.num_bytes)
        host.pin(self.entry)
        self.entry.arrival = self
        owner.placement.add_copy(node, self._copy_of(node))
        if copier.is_in_place:
            self.execute()
            self.is_finished = True
            self.finish()
        else:
            owner.storage.submit("copy", self)

    def run(self) -> None:
        storage = self.owner.storage
        host = storage.host
        if host.faults is not None:
            host.faults.maybe_delay()
        if self.end_saving is not None:
            extents = self.end_saving()
        else:
            extents = storage.copier.save(self.slots, self.layout, host.arena, self.entry.runs, self.after)
        header = self.entry.header
        self.entry.header = replace(header, extents=extents)
        self.entry.checked_s = time.perf_counter()

    def finish(self) -> None:
        owner = self.owner
        owner.room.end_copy(self.num_bytes)
        if self.entry.arrival is self:
            self._arrive()
            return
        node, is_leaving = owner.nodes.get(self.node_id), False
        if node is not None and node.kv.job is self:
            node.kv.job = None
            is_leaving, node.kv.is_leaving = node.kv.is_leaving, False
        if self.error is not None:
            owner.storage.errors[f"host_{self.error}"] += 1
        elif node is not None and node.kv.version == self.version:
            owner.placement.add_copy(node, self._copy_of(node))
            owner.storage.counts["backed_up"] += 1
            if self.goes_on:
                owner.ssd.start_write(self.entry)
            if is_leaving and node.lock_ref == 0 and not has_child_on_gpu(node):
                owner.removal.release(node.id, Tier.HOST)
        else:
            owner.storage.counts["copies_outdated"] += 1
        owner.storage.host.unpin(self.entry)

    def _copy_of(self, node: Node) -> Copy:
        is_lossy_prefix = node.kv.is_lossy_prefix
        return Copy(Tier.HOST, self.form, self.entry, 0, len(self.slots), self.layout, is_lossy_prefix, self.origin)

    def _arrive(self) -> None:
        """The copy that nodes have already is there, or never will be."""
        owner, entry = self.owner, self.entry
        entry.arrival = None
        if self.error is not None:
            for node in [owner.nodes.get(node_id) for node_id in sorted(entry.owners)]:
                if node is not None and node.id in owner.nodes:
                    owner.removal.invalidate_copy(node, Tier.HOST, self.error)
        else:
            owner.storage.counts["backed_up"] += 1
            if self.goes_on and entry.owners:
                owner.ssd.start_write(entry)
        owner.storage.host.unpin(entry)
