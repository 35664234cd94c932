"""Loads that are not over: started by the round, waited for by attention, taken in when they have ended.

What is loaded was verified before, so a load cannot fail, only be late; a layer that is late beyond its deadline is
copied by whoever waits for it. What a load learns the cost model is the time of its copies alone: not of what they were
queued behind, nor of what else the threads of this process did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.layer_gate import LayerGate
from sglang_evicpress.patches.tiers.load import Load, Part
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.node import path_to
from sglang_evicpress.patches.tree.types import Batch, Node

END_S = 5.0
"""What loads have to end when the tree goes."""


class Late(Protocol):
    """Loads that had not ended when the tree went."""

    def __iter__(self) -> Iterator[Load]: ...
    def add(self, load: Load) -> None: ...
    def take_back(self, load: Load) -> None: ...


@dataclass(eq=False, repr=False)
class Loads:
    """Iterates over those of requests, which the ``gate`` waits for. The others, of which nobody knows, fill slots that
    nobody sees before they are over. ``observe`` is told what bringing bytes back from a tier took."""

    storage: Tiers
    late: Late
    written_event: Callable[[], torch.cuda.Event | None]
    observe: Callable[[Tier, int, float, str], None]
    unlock: Callable[[Node], object]
    _: KW_ONLY
    is_cuda: bool

    def __post_init__(self) -> None:
        self._loads: list[Load] = []
        self._unseen: dict[Load, Callable[[Load], None]] = {}
        self.gate = LayerGate(self._loads, is_cuda=self.is_cuda) if self.storage.has_host else None

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def unfinished(self) -> Sequence[Load]:
        """All that may still write to the pool."""
        return [*self._loads, *self._unseen, *self.late]

    def add(self, parts: Sequence[Part], last_node: Node) -> Load:
        """A load of a request, whose path down to ``last_node`` is locked for it and whose entries are pinned. It is
        started once the round has made its batch."""
        load = Load(self.storage, self.written_event, self._finish, parts)
        load.last_nodes.append(last_node)
        self._loads.append(load)
        return load

    def start_unseen(self, part: Part, on_end: Callable[[Load], None]) -> Load:
        """A load, begun, into slots that nobody sees; ``on_end`` frees or uses them, unless the tree has gone."""
        load = Load(self.storage, self.written_event, self._finish, [part])
        self.storage.host.pin(part.copy.entry)
        self._unseen[load] = on_end
        load.start()
        return load

    def start(self, batch: Batch | None) -> None:
        """Start the loads that this round has begun: those that ``batch`` uses as one, so that its first layer is there
        before any second one; those of requests that were not admitted for themselves, and behind it."""
        fresh = [load for load in self._loads if not load.is_started]
        if not fresh:
            return
        used = self.used_by(batch)
        together = [load for load in fresh if load in used]
        for load in together[1:]:
            together[0].take_over(load)
            self._loads.remove(load)
        for load in (*together[:1], *(load for load in fresh if load not in used)):
            load.start()

    def used_by(self, batch: Batch | None) -> list[Load]:
        """The loads that are not over and fill a node on the path of a request of the batch."""
        loads: list[Load] = []
        for req in batch.reqs if batch is not None and self._loads else ():
            for node in () if req.last_node is None else path_to(req.last_node)[::-1]:
                if self.is_arriving(node) and node.kv.load.whole not in loads:
                    loads.append(node.kv.load.whole)
        return loads

    def is_arriving(self, node: Node) -> bool:
        """True if a load still brings what the slots of a node are to hold."""
        return node.kv.load is not None and node.kv.load.whole in self._loads

    def launching(self, batch: Batch) -> AbstractContextManager[None]:
        """While ``batch`` is launched: attention waits for the loads that it uses."""
        if self.gate is None:
            return nullcontext()
        self.start(batch)
        return self.gate.launch(self.used_by(batch), asks=batch.forward_mode.is_extend())

    def stalled_s(self) -> float:
        """Seconds that the batch launched last has waited for loads, as ``LayerGate.stalled_s`` says."""
        return 0.0 if self.gate is None else self.gate.stalled_s

    def join_all(self) -> None:
        """Wait until all that requests wait for is there, or ordered before what comes next."""
        for load in self._loads:
            load.join()

    def end_all(self) -> None:
        """Before the tree goes: nothing writes any more into slots that will be others'."""
        deadline_s = time.monotonic() + END_S
        loads = [*self._loads, *self._unseen]
        are_late = self.storage.ranks.any_of([not load.await_end(deadline_s) for load in loads])
        for load, is_late in zip(loads, are_late, strict=True):
            if not is_late:
                load.finish()
            elif load in self._unseen:
                del self._unseen[load]
                self.late.add(load)
            else:
                self._loads.remove(load)
                self.late.add(load)

    def _finish(self, load: Load) -> None:
        if load in self._unseen:
            on_end = self._unseen.pop(load)
            load.unpin()
            on_end(load)
            return
        if load not in self._loads:
            self.late.take_back(load)  # the cache was flushed
            return
        self._loads.remove(load)
        if load.error is not None:
            self.storage.errors[f"host_load_{load.error}"] += 1
            load.join()  # what was promised to the batch is still there to be copied
        entries = {id(part.copy.entry): part.copy.entry for part in load.parts}.values()
        check_s = {entry.header.form.codec: 0.0 for entry in entries}
        for entry in entries:
            check_s[entry.header.form.codec] += entry.take_check_seconds()
        for codec, (num_bytes, copy_s) in load.copied().items():
            self.observe(Tier.HOST, num_bytes, copy_s + check_s[codec], codec)
        self.storage.counts["late_layers"] += load.num_late
        load.synchronize()
        load.unpin()
        for last in load.last_nodes:
            for node in path_to(last):  # with the nodes that have been split off since
                if node.kv.load is not None and node.kv.load.whole is load:
                    node.kv.load = None
            self.unlock(last)
