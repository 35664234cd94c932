"""A load of nodes from the host, layer by layer, while the batch that wants them already computes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.copies import Copy
from sglang_evicpress.tiers.jobs import Job

LAYER_DEADLINE_S = 0.5
"""What attention waits for a layer; then the waiting thread copies it itself, and those after it that are not there."""

GROUP_SHARES = 4.0
"""Of what a part may copy at a time, that all parts together may: a quarter of a gigabyte, some milliseconds, in a few
launches for each part; a launch takes a third of a millisecond of the threads that also queue the batch."""

END_POLL_S = 0.001
"""Between two looks at a load that must have ended before something else is done."""


@dataclass(frozen=True, slots=True)
class Part:
    """One node's share of a load."""

    copy: Copy
    slots: torch.Tensor

    def slots_of(self, layer: int) -> torch.Tensor:
        """The slots that a layer fills."""
        filling = None if self.copy.layout is None else self.copy.layout.filling
        if filling is None:
            return self.slots
        return self.slots[filling.index_of(filling.group_of[layer], self.slots.device)]


class Load(Job):
    """Host to GPU, layer by layer. Only ``run`` is for its worker thread; it queues the copies on a device and waits
    for none of them, so that the next load is queued behind them at once. ``last_nodes`` end the paths that are locked
    for it; the entries of its parts are pinned by whoever makes it, who is told when it is ``on_end``. It begins behind
    what ``written_event`` marks."""

    priority = 0

    def __init__(
        self,
        storage: Tiers,
        written_event: Callable[[], torch.cuda.Event | None],
        on_end: Callable[[Load], None],
        parts: Sequence[Part],
    ) -> None:
        super().__init__()
        self._storage, self._written_event, self._on_end = storage, written_event, on_end
        self.parts = list(parts)
        self.last_nodes: list[Node] = []
        self.joined: Load | None = None
        self.is_started = False
        self._after: torch.cuda.Event | None = None
        num_layers = storage.copier.num_layers
        self._left, self._taking = self._groups(), threading.Lock()
        self._here = [threading.Event() for _ in range(num_layers)]
        self._events: list[torch.cuda.Event | None] = [None] * num_layers
        self._seconds: list[Mapping[str, float]] = [{}] * num_layers  # of the threads, by codec
        self._begin: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self._late_events: list[torch.cuda.Event | None] = []
        self.num_late = 0

    @property
    def num_slots(self) -> int:
        return sum(len(part.slots) for part in self.parts)

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
            self._after = self._written_event()
            self._storage.submit("load", self)

    def run(self) -> None:
        faults, copier = self._storage.host.faults, self._storage.copier
        with copier.stream(self._after, is_awaited=False):
            self._begin = copier.event()
            try:
                while (layers := self._next()) is not None:
                    if faults is not None:
                        faults.maybe_delay()
                    if not all(self._here[layer].is_set() for layer in layers):
                        self._copy(layers)
            finally:
                self._end = copier.event()  # also after a failure: what was queued until then is still copied

    def finish(self) -> None:
        self._on_end(self)

    def unpin(self) -> None:
        """The host memory that it read may be another's."""
        for part in self.parts:
            self._storage.host.unpin(part.copy.entry)

    def has_ended(self) -> bool:
        return self.has_run.is_set() and all(event.query() for event in self._last_events())

    def await_end(self, deadline_s: float) -> bool:
        """Wait until it has ended, at most until ``deadline_s`` (``time.monotonic``); whether it has."""
        self.start()
        is_over = self.has_run.wait(max(0.0, deadline_s - time.monotonic()))
        while is_over and not self.has_ended():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(END_POLL_S)
        return is_over

    def synchronize(self) -> None:
        """Wait for all that it has queued, which has been reached unless it has failed."""
        for event in self._last_events():
            event.synchronize()

    def _last_events(self) -> list[torch.cuda.Event]:
        return [event for event in (self._end, *self._late_events) if event is not None]

    @property
    def thread_seconds(self) -> float:
        """Seconds of the CPU that threads took to copy, or to queue copies."""
        return sum(map(sum, (took.values() for took in self._seconds)))

    def copied(self) -> dict[str, tuple[int, float]]:
        """By codec, bytes as they are stored and seconds of the copies themselves, once it has ended: of the device
        from the first to the last of them, on the CPU of the threads' own time. Empty where that says nothing: it
        failed, or the device has worked on it in two streams, or on parts of several codecs."""
        sizes = Counter[str]()
        for part in self.parts:
            sizes[part.copy.form.codec] += part.copy.num_bytes
        if self.error is not None:
            return {}
        if self._begin is None:
            own_s = {codec: sum(took.get(codec, 0.0) for took in self._seconds) for codec in sizes}
            return {codec: (num_bytes, own_s[codec]) for codec, num_bytes in sizes.items()}
        if self.num_late or len(sizes) != 1:
            return {}
        ((codec, num_bytes),) = sizes.items()
        return {codec: (num_bytes, self._storage.copier.seconds_between(self._begin, self._end))}

    def join(self) -> None:
        """Wait for all of it."""
        for layer in range(len(self._here)):
            self.wait_for(layer)

    def wait_for(self, layer: int) -> None:
        """Return when the layer is there, or ordered before what this thread's device stream does next. Where threads
        copy and not a device, the waiting one takes layers too, from those that are next. Only the thread that calls
        ``finish`` waits: what it copies is there before anything is let go."""
        self.start()
        if self._storage.copier.is_by_threads:
            while not self._here[layer].is_set() and (layers := self._next()) is not None:
                self._copy(layers)
        is_given_up = self.num_late > 0 or self.has_run.is_set()
        if not self._here[layer].wait(0.0 if is_given_up else LAYER_DEADLINE_S):
            self.num_late += 1
            self._late_events.append(self._copy(range(layer, layer + 1)))
        event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _next(self) -> range | None:
        """Layers that no thread has begun to copy."""
        with self._taking:
            return next(self._left, None)

    def _groups(self) -> Iterator[range]:
        """Layers to be copied at a time: one, so that the batch can begin, then twice as many as before, up to as many
        as each part, and all parts together, may be."""
        most = [self._at_once(part) for part in self.parts if len(part.slots)] or [len(self._here)]
        at_once = max(1, min(*most, int(GROUP_SHARES / sum(1 / one for one in most))))
        first, count = 0, 1
        while first < len(self._here):
            layers = range(first, min(first + count, len(self._here)))
            yield layers
            first, count = layers.stop, min(2 * count, at_once)

    def _at_once(self, part: Part) -> int:
        if part.copy.layout is not None and part.copy.layout.filling is not None:
            return 1  # layers fill other slots
        rows, codec = part.copy.rows_of(0), part.copy.entry.header.form.codec
        return self._storage.copier.layers_at_once(len(part.slots), rows.begin, rows.total, codec)

    def _copy(self, layers: range) -> torch.cuda.Event | None:
        """Twice is harmless: the bytes are the same. Returns an event behind it on CUDA."""
        arena, copier, first = self._storage.host.arena, self._storage.copier, layers.start
        took: dict[str, float] = {}
        for part in self.parts:
            begin_s, entry = time.thread_time(), part.copy.entry
            header, codec = entry.header, entry.header.form.codec
            slots, rows = part.slots_of(first), part.copy.rows_of(first)
            copier.load_layers(layers, slots, arena, entry.runs, header.extents, rows.begin, rows.total, codec)
            took[codec] = took.get(codec, 0.0) + time.thread_time() - begin_s
        self._seconds[first] = took
        event: torch.cuda.Event | None = copier.finish_layers()
        for layer in layers:
            self._events[layer] = event
            self._here[layer].set()
        return event
