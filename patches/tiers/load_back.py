"""Loading nodes back from the host while the batch that wants them already computes: layer l is used once it is there.

Only physical slots are allocated. What is loaded was verified before, so a load cannot fail, only be late;
a layer that is late beyond its deadline is copied by whoever waits for it. What a load learns the cost model is the
time of its copies alone: not of what they were queued behind, nor of what else the threads of this process did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.device import to_device
from sglang_evicpress.patches.tiers.layer_gate import LayerGate
from sglang_evicpress.patches.tree.node import path_to
from sglang_evicpress.tiers.entry.copies import Copy
from sglang_evicpress.tiers.jobs import Job

LAYER_DEADLINE_S = 0.5
"""What attention waits for a layer; then the waiting thread copies it itself, and those after it that are not there."""

END_POLL_S = 0.001
"""Between two looks at a load that must have ended before something else is done."""


@dataclass(frozen=True, slots=True)
class Part:
    """One node's share of a load."""

    copy: Copy
    slots: torch.Tensor


class Load(Job):
    """Host to GPU, layer by layer. Only ``run`` is for its worker thread; it queues the copies on a device and waits
    for none of them, so that the next load is queued behind them at once. ``last_nodes`` end the paths that are locked
    for it; the entries of its parts are pinned by whoever makes it."""

    rank = 0

    def __init__(self, cache: Any, parts: Sequence[Part]) -> None:
        super().__init__()
        self.cache, self.parts = cache, list(parts)
        self.last_nodes: list[Any] = []
        self.joined: Load | None = None
        self.is_started = False
        self.after: Any = None
        num_layers = cache.copier.num_layers
        self._here = [threading.Event() for _ in range(num_layers)]
        self._events: list[Any] = [None] * num_layers
        self._seconds = [0.0] * num_layers
        self._begin: Any = None
        self._end: Any = None
        self._late_events: list[Any] = []
        self.num_late = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(part.slots) for part in self.parts) * int(self.cache.menu.slot_bytes)

    @property
    def whole(self) -> Load:
        """The load that this one has become a part of, else itself."""
        return self if self.joined is None else self.joined

    def take_over(self, other: Load) -> None:
        """Load what ``other`` was to load as well; neither has started."""
        self.parts += other.parts
        self.last_nodes += other.last_nodes
        other.joined = self

    def start(self) -> None:
        """Hand it to its thread, once; it begins behind all that was launched until now."""
        if not self.is_started:
            self.is_started = True
            self.after = self.cache.compressor.written_event()
            self.cache.workers["load"].submit(self)

    def run(self) -> None:
        faults, copier = self.cache.host.faults, self.cache.copier
        with copier.stream(self.after, is_awaited=False):
            self._begin = copier.event()
            try:
                for layer in range(len(self._here)):
                    if faults is not None:
                        faults.maybe_delay()
                    if not self._here[layer].is_set():
                        self._copy(layer)
            finally:
                self._end = copier.event()  # also after a failure: what was queued until then is still copied

    def has_ended(self) -> bool:
        events = [event for event in (self._end, *self._late_events) if event is not None]
        return self.has_run.is_set() and all(event.query() for event in events)

    def await_end(self, deadline_s: float) -> bool:
        """Wait until it has ended, at most until ``deadline_s`` (``time.monotonic``); whether it has."""
        self.start()
        is_over = self.has_run.wait(max(0.0, deadline_s - time.monotonic()))
        while is_over and not self.has_ended():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(END_POLL_S)
        return is_over

    def copy_seconds(self) -> float | None:
        """Seconds of the copies themselves, once it has ended: of the device from the first to the last of them, on
        the CPU of the threads' own time. None where that says nothing: it failed, or the device has worked on it in two
        streams."""
        if self.error is not None:
            return None
        if self._begin is None:
            return sum(self._seconds)
        return None if self.num_late else float(self.cache.copier.seconds_between(self._begin, self._end))

    def join(self) -> None:
        """Wait for all of it."""
        for layer in range(len(self._here)):
            self.wait_for(layer)

    def wait_for(self, layer: int) -> None:
        """Return when the layer is there, or ordered before what this thread's device stream does next."""
        self.start()
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
        begin_s = time.thread_time()
        for part in self.parts:
            entry = part.copy.entry
            header = entry.header
            copier.load_layer(
                layer, part.slots, arena, entry.runs, header.extents[layer], part.copy.begin, header.num_slots
            )
        self._seconds[layer] = time.thread_time() - begin_s
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
            cache.storage.errors[f"host_load_{self.error}"] += 1
            self.join()  # what was promised to the batch is still there to be copied
        entries = {id(part.copy.entry): part.copy.entry for part in self.parts}.values()
        check_s = sum(entry.take_check_seconds() for entry in entries)
        copy_s = self.copy_seconds()
        if copy_s is not None:
            cache.observe_load(Tier.HOST, self.num_bytes, copy_s + check_s)
        cache.storage.counts["late_layers"] += self.num_late
        for event in (self._end, *self._late_events):
            if event is not None:  # reached, unless it has failed
                event.synchronize()
        for part in self.parts:
            cache.host.unpin(part.copy.entry)
        for last in self.last_nodes:
            for node in path_to(last):  # with the nodes that have been split off since
                if node.kv.load is not None and node.kv.load.whole is self:
                    node.kv.load = None
            cache.dec_lock_ref(last)


class LoadBack:
    """The part of EvicPressCache that brings nodes back. Everything here runs on the scheduler thread."""

    def open_loads(self: Any, pool: Any) -> None:
        """From now on attention waits for what is loaded."""
        self.loads: list[Load] = []  # those that are not over
        self.gate: LayerGate | None = None
        if self.host is not None:
            self.gate = LayerGate(self.loads, is_cuda=self.compressor.is_cuda)
            pool.register_layer_transfer_counter(self.gate)

    def start_loads(self: Any, batch: Any) -> None:
        """Start the loads that this round has begun: those that ``batch`` uses as one, so that its first layer is there
        before any second one; those of requests that were not admitted for themselves, and behind it."""
        fresh = [load for load in self.loads if not load.is_started]
        if not fresh:
            return
        used = self.loads_of(batch)
        together = [load for load in fresh if load in used]
        for load in together[1:]:
            together[0].take_over(load)
            self.loads.remove(load)
        for load in (*together[:1], *(load for load in fresh if load not in used)):
            load.start()

    def loads_of(self: Any, batch: Any) -> list[Load]:
        """The loads that are not over and fill a node on the path of a request of ``batch``, which may be None."""
        loads: list[Load] = []
        for req in batch.reqs if batch is not None and self.loads else ():
            node = req.last_node
            while node is not None and node is not self.root_node:
                if self.is_arriving(node) and node.kv.load.whole not in loads:
                    loads.append(node.kv.load.whole)
                node = node.parent
        return loads

    def is_arriving(self: Any, node: Any) -> bool:
        """True if a load still brings what the slots of a node are to hold."""
        return node.kv.load is not None and node.kv.load.whole in self.loads

    def launching(self: Any, batch: Any) -> AbstractContextManager[None]:
        """While ``batch`` is launched: attention waits for the loads that it uses."""
        if self.gate is None:
            return nullcontext()
        self.start_loads(batch)
        return self.gate.launch(self.loads_of(batch), asks=batch.forward_mode.is_extend())

    def stalled_s(self: Any) -> float:
        """Seconds that the batch launched last has waited for loads, as ``LayerGate.stalled_s`` says."""
        return 0.0 if self.gate is None else float(self.gate.stalled_s)

    def init_load_back(self: Any, params: Any) -> tuple[torch.Tensor, Any]:
        """Bring what ``match_prefix`` promised onto the GPU: slots now, bytes while the batch computes.

        Returns the logical indices of the loaded nodes, with holes, and the last of them; nothing and the last node on
        the GPU when there is no room.
        """
        req, last = params.req, params.best_match_node
        path = path_to(last)
        wanted = [node for node in path if node.value is None]
        copies = [node.kv.copies[Tier.HOST] for node in wanted if Tier.HOST in node.kv.copies]
        needed = sum(copy.num_slots for copy in copies)
        allocator = self.token_to_kv_pool_allocator
        self.inc_lock_ref(last)  # they hold no slot yet, and must not go while room is made
        for copy in copies:
            self.host.pin(copy.entry)
        self.make_room(needed)
        slots = allocator.alloc(needed) if len(copies) == len(wanted) else None
        if slots is None:
            self.storage.counts["loads_without_room"] += 1
            req.evicpress_without_room = True
            self.dec_lock_ref(last)
            for copy in copies:
                self.host.unpin(copy.entry)
            req.host_hit_length = 0
            return torch.empty(0, dtype=torch.int64, device=self.device), req.last_node
        load, begin = Load(self, ()), 0
        for node, copy in zip(wanted, copies, strict=True):
            load.parts.append(Part(copy, slots[begin : begin + copy.num_slots].to(torch.int64)))
            self.place(node, copy, load.parts[-1].slots)
            node.kv.load = load
            begin += copy.num_slots
        load.last_nodes.append(last)
        self.loads.append(load)  # started once the round has made its batch
        prefetch = self.prefetches.get(id(req))
        from_ssd = set() if prefetch is None else prefetch.from_ssd  # the nodes may have been split since
        taken = zip(wanted, copies, strict=True)
        req.storage_hit_length = sum(len(node.key) for node, copy in taken if copy.entry in from_ssd)
        self.storage.counts["loaded_tokens"] += sum(len(node.key) for node in wanted)
        self.storage.counts["loads"] += 1
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
        self.ledger.add(len(slots), is_locked=node.lock_ref > 0)
        self.placement.note_resident(node)
        self._record_store_event(node)
        self.changes.changed(node)
