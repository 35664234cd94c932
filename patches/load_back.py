"""Loading nodes back from the host while the batch that wants them already computes: layer l is used once it is there.

Only physical slots are allocated. What is loaded was verified before (staging.py), so a load cannot fail, only be late;
a layer that is late beyond its deadline is copied by whoever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.layout import to_device
from sglang_evicpress.patches.node import path_to
from sglang_evicpress.tiers.copies import Copy
from sglang_evicpress.tiers.worker import Job

LAYER_DEADLINE_S = 0.5
"""What attention waits for a layer; then the waiting thread copies it itself, and those after it that are not there."""


@dataclass(frozen=True, slots=True)
class Part:
    """One node's share of a load."""

    copy: Copy
    slots: torch.Tensor


class Load(Job):
    """Host to GPU, layer by layer."""

    rank = 0

    def __init__(self, cache: Any, parts: Sequence[Part]) -> None:
        super().__init__()
        self.cache, self.parts = cache, parts
        self.last_node: Any = None
        self.after = cache.compressor.written_event()
        num_layers = cache.copier.num_layers
        self._here = [threading.Event() for _ in range(num_layers)]
        self._events: list[Any] = [None] * num_layers
        self._late_events: list[Any] = []
        self.num_late = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(part.slots) for part in self.parts) * int(self.cache.menu.slot_bytes)

    def start(self) -> None:
        for part in self.parts:
            self.cache.host.pin(part.copy.entry)
        self.cache.workers["load"].submit(self)

    def run(self) -> None:
        faults = self.cache.host.faults
        with self.cache.copier.stream(self.after) as stream:
            for layer in range(len(self._here)):
                if faults is not None:
                    faults.maybe_delay()
                if not self._here[layer].is_set():
                    self._copy(layer)
            if stream is not None:
                stream.synchronize()

    def join(self) -> None:
        """Wait for all of it."""
        for layer in range(len(self._here)):
            self.wait_for(layer)

    def wait_for(self, layer: int) -> None:
        """Return when the layer is there, or ordered before what this thread's device stream does next."""
        is_given_up = self.num_late > 0 or self.has_run.is_set()
        if not self._here[layer].wait(0.0 if is_given_up else LAYER_DEADLINE_S):
            self.num_late += 1
            self._late_events.append(self._copy(layer))
        event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _copy(self, layer: int) -> Any:
        """Twice is harmless: the bytes are the same. Returns an event behind it on CUDA."""
        arena, copier = self.cache.host.arena, self.cache.copier
        for part in self.parts:
            entry = part.copy.entry
            header = entry.header
            copier.load_layer(
                layer, part.slots, arena, entry.runs, header.extents[layer], part.copy.begin, header.num_slots
            )
        self._events[layer] = event = copier.finish_layer()
        self._here[layer].set()
        return event

    def finish(self) -> None:
        cache = self.cache
        if self not in cache.loads:
            cache.take_back(self)  # the cache was flushed
            return
        cache.loads.remove(self)
        if self.error is not None:
            cache.tier_errors[f"host_load_{self.error}"] += 1
            self.join()  # what was promised to the batch is still there to be copied
        entries = {id(part.copy.entry): part.copy.entry for part in self.parts}.values()
        check_s = sum(entry.take_check_seconds() for entry in entries)
        cache.observe_load(Tier.HOST, self.num_bytes, self.seconds + check_s)
        cache.tier_counts["late_layers"] += self.num_late
        for event in self._late_events:
            if event is not None:  # what the waiting thread copied, nobody else has waited for
                event.synchronize()
        for part in self.parts:
            cache.host.unpin(part.copy.entry)
        cache.dec_lock_ref(self.last_node)


class LayerGate:
    """What SGLang's pool asks before attention reads a layer: every load that was started before must have it there."""

    def __init__(self, loads: list[Load], *, is_cuda: bool) -> None:
        self._loads = loads
        self._is_cuda = is_cuda

    def wait_until(self, layer: int) -> None:
        if self._loads and self._is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph is made anew from a made-up batch, and must hold no wait for what is loaded now
        for load in self._loads:
            load.wait_for(layer)

    def set_consumer(self, index: int) -> None:
        """SGLang tells which of its own loads a batch waits for; ours are all waited for."""


class LoadBack:
    """The part of EvicPressCache that brings nodes back. Everything here runs on the scheduler thread."""

    def open_loads(self: Any, pool: Any) -> None:
        """From now on attention waits for what is loaded."""
        self.loads: list[Load] = []
        if self.host is not None:
            pool.register_layer_transfer_counter(LayerGate(self.loads, is_cuda=self.compressor.is_cuda))

    def init_load_back(self: Any, params: Any) -> tuple[torch.Tensor, Any]:
        """Bring what ``match_prefix`` promised onto the GPU: slots now, bytes while the batch computes.

        Returns the logical indices of the loaded nodes, with holes, and the last of them; nothing and the last node on
        the GPU when there is no room.
        """
        req, last = params.req, params.best_match_node
        path = path_to(last)
        wanted = [node for node in path if node.value is None]
        copies = [node.kv.copies[Tier.HOST] for node in wanted]
        needed = sum(copy.num_slots for copy in copies)
        allocator = self.token_to_kv_pool_allocator
        self.inc_lock_ref(last)  # they hold no slot yet, and must not go while room is made
        for copy in copies:
            self.host.pin(copy.entry)
        self.make_room(needed)
        slots = allocator.alloc(needed)
        if slots is None:
            self.tier_counts["loads_without_room"] += 1
            self.dec_lock_ref(last)
            for copy in copies:
                self.host.unpin(copy.entry)
            req.host_hit_length = 0
            return torch.empty(0, dtype=torch.int64, device=self.device), req.last_node
        parts, begin = [], 0
        for node, copy in zip(wanted, copies, strict=True):
            parts.append(Part(copy, slots[begin : begin + copy.num_slots].to(torch.int64)))
            self.place(node, copy, parts[-1].slots)
            begin += copy.num_slots
        load = Load(self, parts)
        load.last_node = last
        self.loads.append(load)
        load.start()
        for copy in copies:
            self.host.unpin(copy.entry)
        stage = self.stages.get(id(req))
        from_ssd = set() if stage is None else stage.from_ssd  # the nodes may have been split since
        taken = zip(wanted, copies, strict=True)
        req.storage_hit_length = sum(len(node.key) for node, copy in taken if copy.entry in from_ssd)
        self.tier_counts["loaded_tokens"] += sum(len(node.key) for node in wanted)
        self.tier_counts["loads"] += 1
        req.evicpress = self._view_of(path)
        return torch.cat([node.value for node in wanted]), last

    def place(self: Any, node: Any, copy: Copy, slots: torch.Tensor) -> None:
        """Give a node its slots; what they hold is there, or on its way and the node locked."""
        kv = node.kv
        kv.form, kv.layout, kv.is_lossy_prefix, kv.origin = copy.form, copy.layout, copy.is_lossy_prefix, copy.origin
        kv.version += 1
        if copy.layout is None:
            kv.slots, node.value = None, slots.clone()
        else:
            kv.slots = slots.clone()
            node.value = torch.zeros(len(node.key), dtype=torch.int64, device=slots.device)
            node.value[to_device(copy.layout.logical, slots.device)] = slots
        if node.lock_ref > 0:
            self.protected_size_ += len(slots)
        else:
            self.evictable_size_ += len(slots)
        if Tier.HOST in kv.copies:
            self._spare.add(node.id)
        self._record_store_event(node)
        self.note(node)
