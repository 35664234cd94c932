"""The job that copies what a node holds on the GPU to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tree.node import has_child_on_gpu, slots_of
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.jobs import Job


class Backup(Job):
    """Copies what a resident node holds to the host. What the node holds when it is done must be what it held."""

    def __init__(self, cache: Any, node: Any, runs: Any, *, goes_on: bool) -> None:
        super().__init__()
        kv = node.kv
        self.cache, self.node_id, self.version, self.goes_on = cache, node.id, kv.version, goes_on
        self.form, self.layout, self.origin = kv.form, kv.layout, kv.origin
        self.slots = slots_of(node).clone()
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.after = cache.compressor.written_event()
        self.entry = HostEntry(cache.header_of(node, ()), runs)
        self.end_saving: Callable[[], tuple[Any, ...]] | None = None

    def start(self) -> None:
        self.cache.workers["copy"].submit(self)  # first: where it fails nothing has changed
        self.cache.nodes[self.node_id].kv.job = self
        self.cache._copying_bytes += self.num_bytes
        self.cache.host.pin(self.entry)

    def begin_here(self) -> None:
        """Begin on this thread, behind all that was launched and before whatever overwrites the node's slots: they may
        be freed at once. The node has the copy from now on; until it is there nobody can load it. On the CPU it is
        there."""
        cache, node = self.cache, self.cache.nodes[self.node_id]
        copier, host = cache.copier, cache.host
        with cache.compressor.ahead_of_next_pass():
            self.end_saving = copier.begin_save(self.slots, self.layout, host.arena, self.entry.runs)
        cache._copying_bytes += self.num_bytes
        host.pin(self.entry)
        self.entry.arrival = self
        cache.add_copy(node, self._copy_of(node))
        if copier.is_in_place:
            self.execute()
            self.is_finished = True
            self.finish()
        else:
            cache.workers["copy"].submit(self)

    def run(self) -> None:
        host = self.cache.host
        if host.faults is not None:
            host.faults.maybe_delay()
        if self.end_saving is not None:
            extents = self.end_saving()
        else:
            extents = self.cache.copier.save(self.slots, self.layout, host.arena, self.entry.runs, self.after)
        header = self.entry.header
        self.entry.header = replace(header, extents=extents)
        self.entry.checked_s = time.perf_counter()

    def finish(self) -> None:
        cache = self.cache
        cache._copying_bytes -= self.num_bytes
        if self.entry.arrival is self:
            self._arrive()
            return
        node, is_leaving = cache.nodes.get(self.node_id), False
        if node is not None and node.kv.job is self:
            node.kv.job = None
            is_leaving, node.kv.is_leaving = node.kv.is_leaving, False
        if self.error is not None:
            cache.tier_errors[f"host_{self.error}"] += 1
        elif node is not None and node.kv.version == self.version:
            cache.add_copy(node, self._copy_of(node))
            cache.tier_counts["backed_up"] += 1
            if self.goes_on:
                cache.start_write(self.entry)
            if is_leaving and node.lock_ref == 0 and not has_child_on_gpu(node):
                cache.evict_from_gpu(node.id, Tier.HOST)
        else:
            cache.tier_counts["copies_outdated"] += 1
        cache.host.unpin(self.entry)

    def _copy_of(self, node: Any) -> Copy:
        is_lossy_prefix = node.kv.is_lossy_prefix
        return Copy(Tier.HOST, self.form, self.entry, 0, len(self.slots), self.layout, is_lossy_prefix, self.origin)

    def _arrive(self) -> None:
        """The copy that nodes have already is there, or never will be."""
        cache, entry = self.cache, self.entry
        entry.arrival = None
        if self.error is not None:
            for node in [cache.nodes.get(node_id) for node_id in sorted(entry.owners)]:
                if node is not None and node.id in cache.nodes:
                    cache.invalidate_copy(node, Tier.HOST, self.error)
        else:
            cache.tier_counts["backed_up"] += 1
            if self.goes_on and entry.owners:
                cache.start_write(entry)
        cache.host.unpin(entry)
