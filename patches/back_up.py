"""The job that copies what a node holds on the GPU to the host."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.node import has_child_on_gpu, slots_of
from sglang_evicpress.tiers.copies import Copy, HostEntry
from sglang_evicpress.tiers.worker import Job


class BackUp(Job):
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

    def start(self) -> None:
        self.cache.workers["copy"].submit(self)  # first: where it fails nothing has changed
        self.cache.nodes[self.node_id].kv.job = self
        self.cache._copying_bytes += self.num_bytes
        self.cache.host.pin(self.entry)

    def run(self) -> None:
        host = self.cache.host
        if host.faults is not None:
            host.faults.maybe_delay()
        extents = self.cache.copier.save(self.slots, self.layout, host.arena, self.entry.runs, self.after)
        header = self.entry.header
        self.entry.header = replace(header, extents=extents)
        self.entry.checked_s = time.perf_counter()

    def finish(self) -> None:
        cache = self.cache
        cache._copying_bytes -= self.num_bytes
        node, is_leaving = cache.nodes.get(self.node_id), False
        if node is not None and node.kv.job is self:
            node.kv.job = None
            is_leaving, node.kv.is_leaving = node.kv.is_leaving, False
        if self.error is not None:
            cache.tier_errors[f"host_{self.error}"] += 1
        elif node is not None and node.kv.version == self.version:
            copy = Copy(
                Tier.HOST, self.form, self.entry, 0, len(self.slots), self.layout, node.kv.is_lossy_prefix, self.origin
            )
            cache.add_copy(node, copy)
            cache.tier_counts["backed_up"] += 1
            if self.goes_on:
                cache.start_write(self.entry)
            if is_leaving and node.lock_ref == 0 and not has_child_on_gpu(node):
                cache.release(node.id, Tier.HOST)
        else:
            cache.tier_counts["copies_outdated"] += 1
        cache.host.unpin(self.entry)
