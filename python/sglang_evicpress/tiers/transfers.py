"""KV between a pool on a device and the host's arena: one kernel launch gathers or scatters what half of a bounded
scratch holds, which crosses the bus in as few copies as the arena has runs.

The scratch of a thread has two halves: while one is copied, kernels work on the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from sglang_evicpress.kernels.pool import Backend
from sglang_evicpress.kernels.stage import gather, scatter, stage_table
from sglang_evicpress.tiers.entry.encoding import Extent, extent_of
from sglang_evicpress.tiers.host.arena import Arena, Run, read_pieces, write_pieces

SCRATCH_BYTES = 64 << 20
"""Of the device's memory, for each thread that copies."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Return when the stream has come there."""


class Stream(Protocol):
    """Work on the device, done in order; streams do not wait for each other unless they are told to."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what ``work`` launches."""

    def event(self) -> Event:
        """The point behind all that was queued until now."""

    def wait(self, event: Event) -> None:
        """Let work queued from now on start once ``event`` of any stream was reached; the host waits for nothing."""


class Streams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """That of this thread, in which its kernels run."""

    def another(self) -> Stream:
        """One more."""


@dataclass(slots=True)
class _Half:
    """A part of a scratch, uint8 [bytes], and the point from which on nothing uses it."""

    memory: torch.Tensor
    free: Event


@dataclass(slots=True)
class _Scratch:
    """``copying`` is the stream of the copies; ``halves`` are taken by turns."""

    copying: Stream
    halves: list[_Half]

    def next(self) -> _Half:
        self.halves.reverse()
        return self.halves[0]


@dataclass(slots=True)
class Saving:
    """A save that is queued: the layers that are complete at each mark. ``layer_bytes``: of a layer in ``runs``."""

    arena: Arena
    runs: Sequence[Run]
    layer_bytes: int
    parts: list[tuple[Sequence[int], Event]] = field(default_factory=list)

    def finish(self) -> list[Extent]:
        """Wait until it is there, on any thread, and take the checksums."""
        extents = []
        try:
            for complete, event in self.parts:
                event.synchronize()
                for layer in complete:
                    offset = layer * self.layer_bytes
                    extents.append(extent_of(offset, self.arena.buffers(self.runs, offset, self.layer_bytes)))
        finally:
            if self.parts:
                self.parts[-1][1].synchronize()  # also after a failure: the runs are given to others then
        return extents


class Transfers:
    """Moves rows of K and V buffers, [slots, heads, head_dim] per layer, to where payloads have them and back.

    Any thread may call; each has a scratch of its own, of ``scratch_bytes`` or what one slot of a layer takes twice.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        streams: Streams,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        backend: Backend = "auto",
    ) -> None:
        self._k_buffers, self._v_buffers = list(k_buffers), list(v_buffers)
        self._streams = streams
        self._backend = backend
        self._table = stage_table(k_buffers, v_buffers)
        first = k_buffers[0]
        self._row_bytes = first[0].nbytes
        self._rows_at_once = max(1, scratch_bytes // (4 * self._row_bytes))  # of K and V, in half of it
        self._threads = threading.local()

    def compile(self) -> None:
        """Compile the kernels, by rewriting slot 0 with what it holds, and take this thread's scratch, so that no load
        has to wait for the one or may find no memory for the other."""
        self._scratch_of_thread(self._streams.current())
        slots = torch.zeros(1, dtype=torch.int64, device=self._table.device)
        first = self._k_buffers[0]
        staged = torch.empty((1, 2, 1, *first.shape[1:]), dtype=first.dtype, device=first.device)
        self._gather(0, slots, staged)
        self._scatter(0, slots, staged)

    def save(self, slots: torch.Tensor, arena: Arena, runs: Sequence[Run]) -> list[Extent]:
        """Copy the KV of ``slots`` [n] into ``runs``, from their begin on, and return when it is there."""
        return self.queue_save(slots, arena, runs).finish()

    def queue_save(self, slots: torch.Tensor, arena: Arena, runs: Sequence[Run]) -> Saving:
        """Queue that. All of it is queued at once: while a part is check-summed the next ones are on their way. What is
        queued behind it in this thread's stream may overwrite ``slots``."""
        num_slots = len(slots)
        layer_bytes = 2 * num_slots * self._row_bytes
        kernels = self._streams.current()
        saving = Saving(arena, runs, layer_bytes)
        scratch = self._scratch_of_thread(kernels)
        copying = scratch.copying
        try:
            for first, num_layers, begin, end in self._parts(num_slots):
                half = scratch.next()
                chosen = slots[begin:end]
                staged = self._staged(half, num_layers, end - begin)
                kernels.wait(half.free)
                kernels.run(partial(self._gather, first, chosen, staged))
                copying.wait(kernels.event())
                pieces = self._pieces(arena, runs, first * layer_bytes, num_layers, begin, end, num_slots)
                copying.run(partial(write_pieces, pieces, _bytes(staged)))
                half.free = copying.event()
                saving.parts.append((range(first, first + num_layers) if end == num_slots else (), half.free))
        except Exception:
            copying.event().synchronize()  # the runs are given to others then
            raise
        return saving

    def load(
        self,
        layer: int,
        slots: torch.Tensor,
        arena: Arena,
        runs: Sequence[Run],
        offset: int,
        begin: int,
        num_slots: int,
    ) -> None:
        """Queue that rows [begin, begin + len(slots)) of a layer, which lies at ``offset`` in an entry of
        ``num_slots``, come into ``slots``. The runs must stay until this thread's stream has done it."""
        kernels = self._streams.current()
        scratch = self._scratch_of_thread(kernels)
        copying = scratch.copying
        for at in range(0, len(slots), self._rows_at_once):
            chosen = slots[at : at + self._rows_at_once]
            half = scratch.next()
            staged = self._staged(half, 1, len(chosen))
            pieces = self._pieces(arena, runs, offset, 1, begin + at, begin + at + len(chosen), num_slots)
            copying.wait(half.free)
            copying.run(partial(read_pieces, pieces, _bytes(staged)))
            kernels.wait(copying.event())
            kernels.run(partial(self._scatter, layer, chosen, staged))
            half.free = kernels.event()

    def _parts(self, num_slots: int) -> Iterator[tuple[int, int, int, int]]:
        """Parts that go through half a scratch at once, in a payload's order: (first layer, num layers, begin and end
        of the slots); not all slots, or all of as many layers as fit."""
        num_layers = len(self._k_buffers)
        if num_slots > self._rows_at_once:
            for layer in range(num_layers):
                for begin in range(0, num_slots, self._rows_at_once):
                    yield layer, 1, begin, min(begin + self._rows_at_once, num_slots)
            return
        at_once = self._rows_at_once // num_slots if num_slots else num_layers
        for first in range(0, num_layers, at_once):
            yield first, min(at_once, num_layers - first), 0, num_slots

    def _pieces(
        self, arena: Arena, runs: Sequence[Run], offset: int, num_layers: int, begin: int, end: int, num_slots: int
    ) -> list[torch.Tensor]:
        """The arena's bytes, in order, of rows [begin, end) of layers of which the first is at ``offset``: all rows, or
        those of one layer."""
        num_bytes = (end - begin) * self._row_bytes
        if end - begin == num_slots:
            return arena.tensors(runs, offset, 2 * num_layers * num_bytes)
        keys, values = (offset + row * self._row_bytes for row in (begin, num_slots + begin))
        return arena.tensors(runs, keys, num_bytes) + arena.tensors(runs, values, num_bytes)

    def _gather(self, first: int, slots: torch.Tensor, out: torch.Tensor) -> None:
        layers = slice(first, first + len(out))
        table = self._table[2 * layers.start : 2 * layers.stop]
        gather(self._k_buffers[layers], self._v_buffers[layers], slots, out, table=table, backend=self._backend)

    def _scatter(self, layer: int, slots: torch.Tensor, staged: torch.Tensor) -> None:
        k_buffers, v_buffers = [self._k_buffers[layer]], [self._v_buffers[layer]]
        table = self._table[2 * layer : 2 * layer + 2]
        scatter(k_buffers, v_buffers, slots, staged, table=table, backend=self._backend)

    def _staged(self, half: _Half, num_layers: int, num_slots: int) -> torch.Tensor:
        first = self._k_buffers[0]
        flat = half.memory[: 2 * num_layers * num_slots * self._row_bytes].view(first.dtype)
        return flat.view(num_layers, 2, num_slots, *first.shape[1:])

    def _scratch_of_thread(self, kernels: Stream) -> _Scratch:
        scratch: _Scratch | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            num_bytes = 2 * self._rows_at_once * self._row_bytes
            memory = [torch.empty(num_bytes, dtype=torch.uint8, device=self._table.device) for _ in range(2)]
            # The allocator may have taken it from something that this stream is still to use.
            halves = [_Half(half, kernels.event()) for half in memory]
            self._threads.scratch = scratch = _Scratch(self._streams.another(), halves)
        return scratch


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1).view(torch.uint8)


class CudaStreams:
    """Streams of a CUDA device behind that protocol."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return _TorchStream(torch.cuda.current_stream(self._device))

    def another(self) -> Stream:
        return _TorchStream(torch.cuda.Stream(self._device))


class _TorchStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)
