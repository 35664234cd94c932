"""Compressing what lies in host memory: a node below the GPU is brought to a smaller form off the scheduler thread,
layer by layer, and written to the host anew; it has its old copy until the smaller one is complete."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.placement import MOST_COPIED_SHARE
from sglang_evicpress.patches.tiers.ssd_io import LEAST_HELD_SHARE
from sglang_evicpress.patches.tree.node import has_child_on_gpu, is_reserved, start_of
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry
from sglang_evicpress.tiers.jobs import Job

RECENT_S = 1.0
"""A host entry that was verified so shortly before is not verified again before it is written anew."""


class HostCompression:
    """The part of EvicPressCache that compresses below the GPU. Everything here runs on the scheduler thread."""

    def compress_on_host(
        self: Any, node: Any, form: Form, *, leaves_for: Tier | None = None, keeps_planned: bool = False
    ) -> bool:
        """Begin to bring what the host has of a node to ``form``; the node goes to the tier ``leaves_for`` then. False
        when it cannot be now: there is nothing, or only something too small, something is done with it already, or
        there is no room for both copies, for which redundant copies are given up; with ``keeps_planned`` not those of
        nodes that are to leave the GPU soon."""
        copy = node.kv.copies.get(Tier.HOST)
        num_kept = None if copy is None else self.slots_in(node, form, start_of(node), copy.form)
        if copy is None or num_kept is None or num_kept >= copy.num_slots:
            return False
        if node.lock_ref > 0 or is_reserved(node) or self._is_copied(node):
            return False
        num_bytes = sum(self.copier.sizes(num_kept, True))
        runs = self.host_room(num_bytes, keep=(node.id,), keeps_planned=keeps_planned)
        if runs is None:
            self._host_wanted = max(self._host_wanted, num_bytes)
            self.tier_counts["compressions_without_room"] += 1
            return False
        if node.kv.copies.get(Tier.HOST) is not copy:  # it had to make room itself
            self.host.arena.extents.free(runs)
            return False
        with self.given_back_after_an_error(runs):
            Compression(self, node, copy, form, num_kept, runs, leaves_for=leaves_for).start()
        return True

    def repack(self: Any) -> None:
        """Give pieces of host entries of which most is nobody's any more entries of their own: until then all of such
        an entry is taken."""
        for entry in list(self._fragments):
            del self._fragments[entry]
            nodes = [self.nodes[node_id] for node_id in sorted(entry.owners)]
            num_bytes = sum(node.kv.copies[Tier.HOST].num_slots for node in nodes) * self.menu.slot_bytes
            for node in nodes if num_bytes < LEAST_HELD_SHARE * entry.num_bytes else ():
                self._repack_piece(node, node.kv.copies[Tier.HOST])

    def _repack_piece(self: Any, node: Any, copy: Copy) -> None:
        num_bytes = max(1, sum(self.copier.sizes(copy.num_slots, copy.layout is not None)))
        runs = None if self._is_copied(node) else self.host.arena.extents.alloc(num_bytes)
        if runs is None:
            self._fragments[copy.entry] = None  # later
            return
        with self.given_back_after_an_error(runs):
            Compression(self, node, copy, copy.form, copy.num_slots, runs, leaves_for=None).start()

    def _is_copied(self: Any, node: Any) -> bool:
        """True if something is done with it already, or too much with others."""
        copy = node.kv.copies.get(Tier.HOST)
        is_busy = node.kv.job is not None or node.kv.is_leaving or (copy is not None and copy.entry.arrival is not None)
        return is_busy or self._copying_bytes > MOST_COPIED_SHARE * self.host.num_bytes


class Compression(Job):
    """Makes a smaller copy of what a node has on the host, instead of that, or, with the form it has already, one that
    is no piece of a larger entry. The node must have the same still when it is done."""

    rank = 2  # what is copied off the GPU first

    def __init__(
        self, cache: Any, node: Any, copy: Copy, form: Form, num_kept: int, runs: Any, *, leaves_for: Tier | None
    ):
        super().__init__()
        self.cache, self.node_id, self.copy, self.form, self.leaves_for = cache, node.id, copy, form, leaves_for
        self.start_token, self.num_tokens, self.num_kept = start_of(node), len(node.key), num_kept
        self.window = cache.window_of(node)
        self.after = cache.compressor.written_event()
        self.num_bytes = sum(run.num_bytes for run in runs)
        header = replace(cache.header_of(node, ()), form=form, num_slots=num_kept, is_lossy_prefix=copy.is_lossy_prefix)
        self.entry = HostEntry(header, runs)
        self.layout: Any = None

    def start(self) -> None:
        cache = self.cache
        cache.host.pin(self.copy.entry)
        try:
            cache.workers["copy"].submit(self)
        except Exception:
            cache.host.unpin(self.copy.entry)
            raise
        cache.nodes[self.node_id].kv.job = self
        cache._copying_bytes += self.num_bytes
        cache.host.pin(self.entry)

    def run(self) -> None:
        cache, copy, offset = self.cache, self.copy, 0
        host, copier, source = cache.host, cache.copier, copy.entry
        if source.checked_s < time.perf_counter() - RECENT_S:
            host.check(source)  # the new checksums must not bless damaged bytes
        extents, positions, is_kept = [], [], self.form == copy.form
        with copier.stream(self.after) as stream:
            for layer in range(copier.num_layers):
                header = source.header
                keys, values = copier.read_layer(
                    layer, host.arena, source.runs, header.extents[layer], copy.begin, copy.num_slots, header.num_slots
                )
                pair = keys, values
                if not is_kept:
                    pair, kept = cache.compressor.kept_of_layer(
                        form=self.form,
                        layer=layer,
                        keys=keys,
                        values=values,
                        layout=copy.layout,
                        start=self.start_token,
                        num_tokens=self.num_tokens,
                        num_kept=self.num_kept,
                        window=self.window,
                    )
                    positions.append(kept.cpu())
                extents.append(copier.write_layer(pair, host.arena, self.entry.runs, offset, stream))
                offset += extents[-1].num_bytes
        self.layout = copy.layout
        if not is_kept:
            self.layout = cache.compressor.layout_of(torch.stack(positions), self.start_token)
        if self.layout is not None:
            extents.append(copier.write_layout(self.layout, host.arena, self.entry.runs, offset))
        self.entry.header = replace(self.entry.header, extents=tuple(extents))
        self.entry.checked_s = time.perf_counter()

    def finish(self) -> None:
        cache, copy = self.cache, self.copy
        cache._copying_bytes -= self.num_bytes
        node = cache.nodes.get(self.node_id)
        if node is not None and node.kv.job is self:
            node.kv.job = None
        if self.error is not None:
            for owner in [cache.nodes.get(owner) for owner in sorted(copy.entry.owners)]:
                if owner is not None and owner.id in cache.nodes:
                    cache.invalidate_copy(owner, Tier.HOST, self.error)
        elif (
            node is not None
            and node.kv.copies.get(Tier.HOST) is copy
            and (self.form == copy.form or not is_reserved(node))  # who waits for it counts on what it was
        ):
            self._replace(node)
        else:
            cache.tier_counts["copies_outdated"] += 1
        cache.host.unpin(copy.entry)
        cache.host.unpin(self.entry)

    def _replace(self, node: Any) -> None:
        """The node has the smaller copy from now on."""
        cache, copy, kv = self.cache, self.copy, node.kv
        is_kept = self.form == copy.form
        origin = node.id if copy.origin is None and not is_kept else copy.origin
        cache.add_copy(
            node,
            Copy(Tier.HOST, self.form, self.entry, 0, self.num_kept, self.layout, copy.is_lossy_prefix, origin),
        )
        cache.tier_counts["repacked" if is_kept else "compressed_on_host"] += 1
        if self.leaves_for is None or node.lock_ref > 0 or is_reserved(node) or has_child_on_gpu(node):
            return
        if self.leaves_for == Tier.SSD:
            kv.is_leaving = node.value is None
            if not cache.start_write(self.entry):
                kv.is_leaving = False
        if node.value is not None:
            cache.evict_from_gpu(node.id, Tier.HOST)
