"""Entries on SSD: writing them from the host, reading them back, and finding those of an earlier server."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tree.node import is_reserved, start_of
from sglang_evicpress.tiers.entry.copies import HostEntry, SsdEntry
from sglang_evicpress.tiers.entry.encoding import BadEntry, Header, check_identity
from sglang_evicpress.tiers.jobs import Job

LEAST_HELD_SHARE = 1 / 2
"""Of an entry: where nodes hold less of it, it is given up."""

MAX_CANDIDATES = 4
"""Entries under one lookup key that a lookup reads the header of."""


class SsdMoves:
    """The part of EvicPressCache that writes and reads SSD entries. Runs on the scheduler thread but for ``run``."""

    def start_write(self: Any, entry: HostEntry) -> bool:
        """Begin to write a host entry to the SSD, for all nodes that hold a piece of it."""
        if self.ssd is None or entry.write is not None:
            return self.ssd is not None
        if entry.arrival is not None:
            entry.arrival.goes_on = True  # once it is there
            return True
        if entry.ssd is not None and entry.ssd.owners:
            self._share(entry, entry.ssd)
            return True
        owners = (self.nodes[node_id] for node_id in entry.owners)
        if any(self.adapters.ssd_scope(node.key.extra_key) is None for node in owners):
            self.tier_counts["writes_refused"] += 1
            return False
        reservation = self.ssd_room(entry.header.payload_bytes)
        if reservation is None:
            self.tier_counts["writes_refused"] += 1
            return False
        Write(self, entry, reservation).start()
        return True

    def ssd_room(self: Any, num_bytes: int) -> Any:
        """A reservation, if the wear budget and the tier's bound allow it now. If it is full, room is made for later:
        giving bytes back takes the file system a while."""
        ssd = self.ssd
        if not ssd.store.is_writable or num_bytes > ssd.store.capacity_bytes:
            return None
        if not ssd.wear.allows(ssd.now_s):
            ssd.wear.refuse(num_bytes)
            return None
        reservation = ssd.store.reserve(num_bytes)
        if reservation is None:
            self.make_ssd_room(max(num_bytes, ssd.store.capacity_bytes // 64))
        else:
            ssd.wear.take(num_bytes)
        return reservation

    def make_ssd_room(self: Any, num_bytes: int) -> None:
        """Remove what so many bytes more need: first entries that no node holds, then those whose nodes are all on a
        faster tier, then nodes that lose least by it. Between two ticks no more than ``MOST_GIVEN_UP`` of them."""
        ssd, writers = self.ssd, self.workers["write"]
        self.num_to_give_up -= ssd.drop_unused(ssd.lacking(num_bytes), self.num_to_give_up, writers)
        self._drop_redundant(ssd.lacking(num_bytes))
        lacking = ssd.lacking(num_bytes)
        if lacking and self.num_to_give_up > 0:
            former = self.planner.index.num_on[Tier.SSD]
            self.controller.free_bytes(Tier.SSD, self._bounded(Tier.SSD, lacking))
            self.num_to_give_up -= max(1, former - self.planner.index.num_on[Tier.SSD])
        ssd.reclaim(writers)

    def drop_fragments(self: Any) -> None:
        """Give up pieces of SSD entries of which most is nobody's any more: until then all of such an entry is taken,
        and to get a piece all of it is read. Those of nodes on a faster tier, and those that are computed sooner."""
        for entry in list(self.ssd_fragments):
            del self.ssd_fragments[entry]
            nodes, whole = [self.nodes[node_id] for node_id in sorted(entry.owners)], entry.header.payload_bytes
            num_bytes = sum(node.kv.copies[Tier.SSD].num_slots for node in nodes) * self.menu.slot_bytes
            if num_bytes >= LEAST_HELD_SHARE * whole:
                continue
            load_s = self.costs.load_seconds(Tier.SSD, whole)
            for node in nodes:
                recompute_s = self.costs.prefill.marginal_seconds(len(node.key), start_of(node))
                if tier_of(node) < Tier.SSD:
                    self.remove_copy(node, Tier.SSD)
                    self.changes.changed(node)
                elif not (node.children or node.lock_ref or is_reserved(node)) and recompute_s < load_s:
                    self.drop(node.id)

    def _drop_redundant(self: Any, wanted: int) -> None:
        for entry in self.redundant_ssd.first(max(0, self.num_to_give_up)) if wanted > 0 else ():
            if wanted <= 0:
                return
            wanted -= entry.header.payload_bytes
            self.num_to_give_up -= 1
            for node in [self.nodes[node_id] for node_id in sorted(entry.owners)]:
                self.remove_copy(node, Tier.SSD)
                self.changes.changed(node)

    def start_read(self: Any, entry: SsdEntry) -> Any:
        """Begin to read an SSD entry into the host, for all nodes that hold a piece of it; the job, None without
        room, or while the disk does not answer."""
        if entry.read is None:
            if not self.ssd.store.is_answering:
                self.tier_counts["reads_of_a_hung_ssd"] += 1
                return None
            runs = self.host_room(entry.header.payload_bytes)
            if runs is None:
                self._host_wanted = max(self._host_wanted, entry.header.payload_bytes)
                self.mark_dirty(at_once=True)
                self.tier_counts["reads_without_room"] += 1
                return None
            entry.read = Read(self, entry, runs)
            entry.read.start()
        return entry.read

    def _share(self: Any, entry: HostEntry, ssd: SsdEntry) -> None:
        """Give every node with a piece of the host entry the same piece on SSD."""
        for node in [self.nodes[node_id] for node_id in sorted(entry.owners)]:
            copy = node.kv.copies[Tier.HOST]
            if node.id not in ssd.owners:  # else giving it up first could be the end of the entry
                self.add_copy(node, replace(copy, tier=Tier.SSD, entry=ssd))
            is_leaving, node.kv.is_leaving = node.kv.is_leaving, False
            if is_leaving and node.lock_ref == 0 and node.value is None and not is_reserved(node):
                self.evict_from_gpu(node.id, Tier.SSD)

    def arrived(self: Any, entry: SsdEntry, host: HostEntry) -> None:
        """An SSD entry is on the host as well, unless there is better."""
        for node in [self.nodes[node_id] for node_id in sorted(entry.owners)]:
            copy, present = node.kv.copies[Tier.SSD], node.kv.copies.get(Tier.HOST)
            if present is None or (node.value is not None and copy.is_exact and not present.is_exact):
                self.add_copy(node, replace(copy, tier=Tier.HOST, entry=host))


class Write(Job):
    """Host to SSD."""

    def __init__(self, cache: Any, entry: HostEntry, reservation: Any) -> None:
        super().__init__()
        self.cache, self.entry, self.reservation = cache, entry, reservation
        self.ssd = cache.ssd
        self.layouts = [cache.nodes[node_id].kv.copies[Tier.HOST].layout for node_id in entry.owners]
        self.ref: Any = None

    def start(self) -> None:
        self.entry.write = self
        self.cache.host.pin(self.entry)
        self.cache.workers["write"].submit(self)

    def run(self) -> None:
        header = self.entry.header
        chunks = self.cache.host.arena.buffers(self.entry.runs, 0, header.payload_bytes)
        self.ref = self.ssd.store.write(self.reservation, header, chunks)
        for layout in self.layouts:
            if layout is not None:
                layout.prepare_pack()  # for when the SSD alone has it

    def finish(self) -> None:
        cache, entry = self.cache, self.entry
        entry.write = None
        if self.error is not None:
            cache.tier_errors[f"ssd_write_{self.error}"] += 1
            for node_id in entry.owners:
                cache.nodes[node_id].kv.is_leaving = False
        elif self.ssd is cache.ssd:  # else it was detached meanwhile, and keeps what was published
            if entry.owners:
                cache.tier_counts["written"] += 1
                entry.ssd = self.ssd.hold(self.ref, entry.header)
                cache._share(entry, entry.ssd)
            else:
                self.ssd.forget(self.ref, cache.workers["write"])
        else:
            for node_id in entry.owners:
                cache.nodes[node_id].kv.is_leaving = False
        cache.host.unpin(entry)


class Read(Job):
    """SSD to host, verified."""

    rank = 0

    def __init__(self, cache: Any, entry: SsdEntry, runs: Any) -> None:
        super().__init__()
        self.cache, self.entry = cache, entry
        self.ssd = cache.ssd
        self.host = HostEntry(entry.header, runs, ssd=entry)
        self.measured: tuple[int, float] | None = None

    @property
    def num_bytes(self) -> int:
        return self.entry.header.payload_bytes

    def start(self) -> None:
        self.cache.reads[self] = None
        self.cache.host.pin(self.host)
        self.cache.workers["read"].submit(self)

    def run(self) -> None:
        header, meter, num_bytes = self.entry.header, self.cache.read_timer, 0
        chunks = self.cache.host.arena.buffers(self.host.runs, 0, header.payload_bytes)
        meter.begin(time.perf_counter())
        try:
            self.ssd.store.read(self.entry.ref, header, chunks)
            num_bytes = header.payload_bytes
        finally:
            self.measured = meter.end(time.perf_counter(), num_bytes)
        self.host.checked_s = time.perf_counter()

    def finish(self) -> None:
        cache, entry = self.cache, self.entry
        entry.read = None
        cache.reads.pop(self, None)
        if self.error is None:
            cache.tier_counts["read"] += 1
            cache.ssd_seen_s = time.perf_counter()
            cache.arrived(entry, self.host)
        else:
            for node in [cache.nodes[node_id] for node_id in sorted(entry.owners)]:
                if node.id in cache.nodes:
                    cache.invalidate_copy(node, Tier.SSD, self.error)
        if self.measured is not None:
            num_bytes, seconds = self.measured
            cache.observe_load(Tier.SSD, num_bytes, seconds + cache.costs.load_seconds(Tier.HOST, num_bytes))
        cache.host.unpin(self.host)


class Lookup(Job):
    """Reads the headers of entries that may continue a path, and keeps the one that shares most with ``tokens``."""

    rank = 0

    def __init__(self, cache: Any, refs: list[Any], tokens: bytes, parent_key: bytes, namespace: bytes) -> None:
        super().__init__()
        self.cache, self.refs, self.tokens = cache, refs[:MAX_CANDIDATES], tokens
        self.parent_key, self.namespace = parent_key, namespace
        self.ssd = cache.ssd
        self.found: tuple[Any, Header] | None = None
        self.survivors: bytes | None = None
        self.num_shared = 0

    def run(self) -> None:
        for ref in self.refs:
            try:
                header = self.ssd.store.read_header(ref)
                check_identity(
                    header,
                    fingerprint=self.cache.adapters.identity,
                    namespace=self.namespace,
                    parent_key=self.parent_key,
                )
            except BadEntry:
                continue  # counted by the store, or the lookup key of another path
            if header.num_slots == 0:
                continue  # holes only: nothing is gained
            num_shared = shared_tokens(header.tokens, self.tokens)
            if num_shared < self.cache.page_size:
                continue  # another way out of the path, under a lookup key of the same number
            if header.shape == self.cache.copier.shape and num_shared > self.num_shared:
                self.found, self.num_shared = (ref, header), num_shared
        if self.found is not None and len(self.found[1].extents) > self.found[1].shape.num_layers:
            self._read_survivors(*self.found)

    def _read_survivors(self, ref: Any, header: Header) -> None:
        """A lossy entry can only be matched in part by its survivors, which are the last of its payload. They are too
        few bytes to show what a read costs; the KV is read, and checked, once the entry is wanted."""
        try:
            self.survivors = self.ssd.store.read_extent(ref, header, len(header.extents) - 1)
        except BadEntry:
            self.found = None

    def finish(self) -> None:
        """Whoever asked looks at what was found when all its jobs are over."""


def shared_tokens(left: bytes, right: bytes) -> int:
    """Number of leading tokens (4 bytes each) that two rows share."""
    if left == right[: len(left)]:
        return len(left) // 4
    size = min(len(left), len(right))
    differs = np.frombuffer(left[:size], "<u4") != np.frombuffer(right[:size], "<u4")
    return int(differs.argmax()) if differs.any() else size // 4
