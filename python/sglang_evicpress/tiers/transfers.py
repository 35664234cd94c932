"""KV between a pool on a device and the host's arena: one kernel launch gathers or scatters what half of a bounded
scratch holds, as it is or as a codec stores it, which crosses the bus in as few copies as the arena has runs.

The scratch of a thread has two halves: while one is copied, kernels work on the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypedDict

import torch

from sglang_evicpress.codec import DoesNotFitError, NotFiniteError, StoredFormError
from sglang_evicpress.codec.layout import (
    FLAG_AT,
    GROUP,
    HEADER,
    LOSSLESS,
    GroupLayout,
    LosslessLayout,
    layout_of,
    stored_layout,
)
from sglang_evicpress.kernels import lossless_codec
from sglang_evicpress.kernels.group_codec import decode, encode
from sglang_evicpress.kernels.pool import Backend
from sglang_evicpress.kernels.stage import gather, scatter, stage_table
from sglang_evicpress.tiers.entry.header import Extent, extent_of
from sglang_evicpress.tiers.host.allocator import Run
from sglang_evicpress.tiers.host.arena import Arena, read_pieces, write_pieces

SCRATCH_BYTES = 128 << 20
"""Of the device's memory, for each thread that copies."""


Layout = GroupLayout | LosslessLayout


class _LaunchOptions(TypedDict):
    """The layers' addresses, and the backend."""

    table: torch.Tensor
    backend: Backend


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
    """A save that is queued: the layers that are complete at each mark. ``layer_bytes``: of a layer in ``runs``, the
    first at ``offset``. ``header``: that of every layer where a codec has one, put there when the rest is there;
    ``flag``, int32 [1] on the device, is not zero then if rows cannot be stored, as the codec's kernels tell."""

    arena: Arena
    runs: Sequence[Run]
    layer_bytes: int
    parts: list[tuple[Sequence[int], Event]] = field(default_factory=list)
    offset: int = 0
    header: bytes = b""
    flag: torch.Tensor | None = None

    def finish(self) -> list[Extent]:
        """Wait until it is there, on any thread, and take the checksums. Raises NotFiniteError for rows with NaN or Inf
        that were encoded, and DoesNotFitError for those that the codec has no room for."""
        extents = []
        try:
            for complete, event in self.parts:
                event.synchronize()
                if self.header and event is self.parts[-1][1]:
                    self._check_flag()
                for layer in complete:
                    offset = self.offset + layer * self.layer_bytes
                    if self.header:
                        header = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
                        write_pieces(self.arena.tensors(self.runs, offset, HEADER.size), header)
                    extents.append(extent_of(offset, self.arena.buffers(self.runs, offset, self.layer_bytes)))
        finally:
            if self.parts:
                self.parts[-1][1].synchronize()  # also after a failure: the runs are given to others then
        return extents

    def queue_flag(self, num_layers: int, copying: Stream) -> None:
        """Let the flag come where the last layer is to have its header, at the last mark."""
        if self.flag is not None:
            copying.run(partial(write_pieces, self._flag_pieces(num_layers), self.flag.view(torch.uint8)))
            self.parts[-1] = self.parts[-1][0], copying.event()

    def _check_flag(self) -> None:
        last = self.parts[-1][0][-1]
        flag = int.from_bytes(b"".join(bytes(piece.tolist()) for piece in self._flag_pieces(last + 1)), sys.byteorder)
        if flag & lossless_codec.NOT_FINITE:
            raise NotFiniteError("rows hold NaN or Inf")
        if flag:
            raise DoesNotFitError("a block has more exponents that need escapes than it has room for")

    def _flag_pieces(self, num_layers: int) -> list[torch.Tensor]:
        return self.arena.tensors(self.runs, self.offset + (num_layers - 1) * self.layer_bytes + FLAG_AT, 4)


@dataclass(frozen=True, slots=True)
class _Rows:
    """K and V buffers of some layers, and the table of their addresses."""

    k_buffers: Sequence[torch.Tensor]
    v_buffers: Sequence[torch.Tensor]
    table: torch.Tensor

    @classmethod
    def of(cls, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor]) -> _Rows:
        return cls(k_buffers, v_buffers, stage_table(k_buffers, v_buffers))

    def layers(self, first: int, count: int) -> _Rows:
        end = first + count
        return _Rows(self.k_buffers[first:end], self.v_buffers[first:end], self.table[2 * first : 2 * end])


@dataclass(frozen=True, slots=True)
class _Part:
    """What goes through half a scratch at once: ``launch`` fills its first ``num_bytes``, which go from ``skipped`` on
    to ``pieces`` of the arena; ``complete`` are the layers of which all is there then."""

    num_bytes: int
    launch: Callable[[torch.Tensor], None]
    skipped: int
    pieces: Sequence[torch.Tensor]
    complete: Sequence[int]


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
        self._pool = _Rows.of(list(k_buffers), list(v_buffers))
        self._streams = streams
        self._backend = backend
        self._device = k_buffers[0].device
        first = k_buffers[0]
        self._row_bytes = first[0].nbytes
        self._rows_at_once = max(1, scratch_bytes // (4 * self._row_bytes))  # of K and V, in half of it
        self._half_bytes = 2 * max(self._rows_at_once, GROUP) * self._row_bytes + HEADER.size
        self._threads = threading.local()
        self._compiled: set[str] = set()

    def compile(self, codecs: Iterable[str] = ()) -> None:
        """Compile the kernels, those of ``codecs`` too, by rewriting slot 0 with what it holds, and take this thread's
        scratch, so that no copy that is queued while the scheduler waits, has to wait for the one or may find no memory
        for the other. Each other thread takes its own with its first job."""
        self._scratch_of_thread(self._streams.current())
        slots = torch.zeros(1, dtype=torch.int64, device=self._device)
        staged = torch.empty(2 * self._row_bytes, dtype=torch.uint8, device=self._device)
        self._stage(gather, self._pool.layers(0, 1), slots, staged)
        self._stage(scatter, self._pool.layers(0, 1), slots, staged)
        for codec in codecs:
            self._compile_codec(codec)

    def queue_save(self, slots: torch.Tensor, arena: Arena, runs: Sequence[Run]) -> Saving:
        """Queue a copy of the KV of ``slots`` [n] into ``runs``, from their begin on, all at once: while a part is
        check-summed the next ones are on their way. What is queued behind it in this thread's stream may overwrite
        ``slots``."""
        saving = Saving(arena, runs, 2 * len(slots) * self._row_bytes)
        return self._queued(saving, self._raw_parts(slots, saving))

    def queue_encode(
        self,
        slots: torch.Tensor,
        arena: Arena,
        runs: Sequence[Run],
        codec: str,
        *,
        pair: tuple[torch.Tensor, torch.Tensor] | None = None,
        offset: int = 0,
    ) -> Saving:
        """``queue_save`` of what a codec makes of it. ``pair``: K and V of one layer, of which
        ``slots`` are taken instead of the pool's, to ``offset``."""
        if codec not in self._compiled:
            self._streams.current().run(partial(self._compile_codec, codec))
        rows = self._pool if pair is None else _Rows.of([pair[0]], [pair[1]])
        layout = self._layout_of(codec, len(slots))
        flag = torch.zeros(1, dtype=torch.int32, device=self._device)
        saving = Saving(arena, runs, layout.num_bytes, offset=offset, header=layout.header(), flag=flag)
        return self._queued(saving, self._encoded_parts(rows, slots, layout, saving, flag), len(rows.k_buffers))

    def _compile_codec(self, codec: str) -> None:
        """Compile the kernels by a row that nobody reads."""
        self._compiled.add(codec)
        layout, row = self._layout_of(codec, 1), torch.zeros_like(self._pool.k_buffers[0][:1])
        slots, stored = (torch.zeros(size, dtype=dtype, device=self._device)
                         for size, dtype in ((1, torch.int64), (layout.num_bytes, torch.uint8)))  # fmt: skip
        rows = _Rows.of([row], [torch.zeros_like(row)])
        self._encode(rows, slots, layout, torch.zeros(1, dtype=torch.int32, device=self._device), stored)
        self._decode(rows, slots, layout, 0, stored)

    def _queued(self, saving: Saving, parts: Iterator[_Part], num_layers: int = 0) -> Saving:
        kernels = self._streams.current()
        scratch = self._scratch_of_thread(kernels)
        copying = scratch.copying
        try:
            for part in parts:
                half = scratch.next()
                memory = half.memory[: part.num_bytes]
                kernels.wait(half.free)
                kernels.run(partial(part.launch, memory))
                copying.wait(kernels.event())
                copying.run(partial(write_pieces, part.pieces, memory[part.skipped :]))
                half.free = copying.event()
                saving.parts.append((part.complete, half.free))
            saving.queue_flag(num_layers, copying)
        except Exception:
            copying.event().synchronize()  # the runs are given to others then
            raise
        return saving

    def _raw_parts(self, slots: torch.Tensor, saving: Saving) -> Iterator[_Part]:
        num_slots = len(slots)
        for first, num_layers, begin, end in self._parts(num_slots):
            pieces = self._pieces(
                saving.arena, saving.runs, first * saving.layer_bytes, num_layers, begin, end, num_slots
            )
            launch = partial(self._stage, gather, self._pool.layers(first, num_layers), slots[begin:end])
            complete = range(first, first + num_layers) if end == num_slots else ()
            yield _Part(2 * num_layers * (end - begin) * self._row_bytes, launch, 0, pieces, complete)

    def _encoded_parts(
        self, rows: _Rows, slots: torch.Tensor, layout: Layout, saving: Saving, flag: torch.Tensor
    ) -> Iterator[_Part]:
        """As many whole layers as fit, or parts of one, without their headers."""
        tensors, layer_bytes = partial(saving.arena.tensors, saving.runs), layout.num_bytes
        num_layers, at_once = len(rows.k_buffers), self._half_bytes // layer_bytes
        if at_once:
            for first in range(0, num_layers, at_once):
                count = min(at_once, num_layers - first)
                pieces = tensors(saving.offset + first * layer_bytes, count * layer_bytes)
                launch = partial(self._encode, rows.layers(first, count), slots, layout, flag)
                yield _Part(count * layer_bytes, launch, 0, pieces, range(first, first + count))
            return
        for layer in range(num_layers):
            offset = saving.offset + layer * layer_bytes
            for begin, end in self._ranges(layout, 0, layout.num_slots):
                part, spans = layout.part(begin, end)
                pieces = [piece for at, to in spans for piece in tensors(offset + at, to - at)]
                launch = partial(self._encode, rows.layers(layer, 1), slots[begin:end], part, flag)
                yield _Part(part.num_bytes, launch, HEADER.size, pieces, (layer,) if end == layout.num_slots else ())

    def layers_at_once(self, num_slots: int, codec: str = "raw") -> int:
        """How many layers of so many slots ``load`` and ``decode`` take at a time, at least one."""
        raw_bytes = 2 * num_slots * self._row_bytes
        layer_bytes = raw_bytes if codec == "raw" else self._layout_of(codec, num_slots).num_bytes
        return max(1, (self._half_bytes - HEADER.size) // layer_bytes)

    def load(
        self,
        layers: range,
        slots: torch.Tensor,
        arena: Arena,
        runs: Sequence[Run],
        offset: int,
        begin: int,
        num_slots: int,
    ) -> None:
        """Queue that rows [begin, begin + len(slots)) of layers, which lie one behind the other from ``offset`` on in
        an entry of ``num_slots``, come into ``slots``: by one launch as many as ``layers_at_once``, or one. The runs
        must stay until this thread's stream has done it."""
        kernels = self._streams.current()
        scratch = self._scratch_of_thread(kernels)
        copying, rows, count = scratch.copying, self._pool.layers(layers.start, len(layers)), len(layers)
        for at in range(0, len(slots), self._rows_at_once):
            chosen = slots[at : at + self._rows_at_once]
            half = scratch.next()
            staged = half.memory[: 2 * count * len(chosen) * self._row_bytes]
            pieces = self._pieces(arena, runs, offset, count, begin + at, begin + at + len(chosen), num_slots)
            copying.wait(half.free)
            copying.run(partial(read_pieces, pieces, staged))
            kernels.wait(copying.event())
            kernels.run(partial(self._stage, scatter, rows, chosen, staged))
            half.free = kernels.event()

    def decode(
        self,
        into: range | tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        arena: Arena,
        runs: Sequence[Run],
        extent: Extent,
        begin: int,
        num_slots: int,
        codec: str,
    ) -> None:
        """``load`` of what ``queue_encode`` has saved, into these layers of the pool, or a pair of K and V; ``extent``
        is that of the first layer, and of several all rows are wanted. Headers are read in the arena. Raises
        StoredFormError unless the bytes are the codec's."""
        rows = self._pool.layers(into.start, len(into)) if isinstance(into, range) else _Rows.of([into[0]], [into[1]])
        count = len(rows.k_buffers)
        every = range(extent.offset, extent.offset + count * extent.num_bytes, extent.num_bytes)
        header, *others = (b"".join(map(bytes, arena.buffers(runs, offset, HEADER.size))) for offset in every)
        layout = self._stored_layout(header, extent.num_bytes, num_slots, codec)
        if any(other != header for other in others):
            raise StoredFormError(f"headers of {count} layers differ: expected {header.hex()} of each")
        num_bytes = count * extent.num_bytes
        is_whole = len(slots) == num_slots and num_bytes <= self._half_bytes  # one copy instead of six
        if count > 1 and not is_whole:
            raise ValueError(f"{count} layers of {len(slots)} slots: expected one, or all {num_slots} of what fits")
        kernels = self._streams.current()
        scratch = self._scratch_of_thread(kernels)
        copying = scratch.copying
        for at, to in [(0, num_slots)] if is_whole else self._ranges(layout, begin, begin + len(slots)):
            part, spans = (layout, [(HEADER.size, num_bytes)]) if is_whole else layout.part(at, to)
            pieces = [piece for a, b in spans for piece in arena.tensors(runs, extent.offset + a, b - a)]
            first, end = max(begin, at), min(begin + len(slots), to)
            half = scratch.next()
            staged = half.memory[: count * part.num_bytes]
            copying.wait(half.free)
            copying.run(partial(read_pieces, pieces, staged[HEADER.size :]))
            kernels.wait(copying.event())
            kernels.run(partial(self._decode, rows, slots[first - begin : end - begin], part, first - at, staged))
            half.free = kernels.event()

    def _stored_layout(self, header: bytes, num_bytes: int, num_slots: int, codec: str) -> Layout:
        layout = self._layout_of(codec, num_slots)
        if isinstance(layout, LosslessLayout):
            layout.check(header, num_bytes)
            return layout
        return stored_layout(header, num_bytes, layout)

    def _ranges(self, layout: Layout, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of whole groups over slots [begin, end), as many as half a scratch holds for sure."""
        group = layout.group
        at_once = max(1, self._rows_at_once // group) * group
        for at in range(begin // group * group, end, at_once):
            yield at, min(at + at_once, layout.num_slots, -(-end // group) * group)

    def _layout_of(self, codec: str, num_slots: int) -> Layout:
        first = self._pool.k_buffers[0]
        if codec == LOSSLESS:
            return LosslessLayout(num_slots, first[0].numel())
        return layout_of(codec, num_slots, first[0].numel(), first.element_size())

    def _parts(self, num_slots: int) -> Iterator[tuple[int, int, int, int]]:
        """Parts that go through half a scratch at once, in a payload's order: (first layer, num layers, begin and end
        of the slots); not all slots, or all of as many layers as fit."""
        num_layers = len(self._pool.k_buffers)
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
        """The arena's bytes, in order, of rows [begin, end) of layers of which the first is at ``offset``."""
        num_bytes = (end - begin) * self._row_bytes
        if end - begin == num_slots:
            return arena.tensors(runs, offset, 2 * num_layers * num_bytes)
        at = offset + begin * self._row_bytes
        halves = range(at, at + 2 * num_layers * num_slots * self._row_bytes, num_slots * self._row_bytes)
        return [piece for keys_or_values in halves for piece in arena.tensors(runs, keys_or_values, num_bytes)]

    def _stage(self, copy: Callable[..., None], rows: _Rows, slots: torch.Tensor, memory: torch.Tensor) -> None:
        """Gather or scatter these layers."""
        first = rows.k_buffers[0]
        staged = memory.view(first.dtype).view(len(rows.k_buffers), 2, len(slots), *first.shape[1:])
        copy(rows.k_buffers, rows.v_buffers, slots, staged, table=rows.table, backend=self._backend)

    def _encode(
        self, rows: _Rows, slots: torch.Tensor, layout: Layout, flag: torch.Tensor, memory: torch.Tensor
    ) -> None:
        out, options = memory.view(len(rows.k_buffers), -1), _LaunchOptions(table=rows.table, backend=self._backend)
        if isinstance(layout, LosslessLayout):
            lossless_codec.encode(rows.k_buffers, rows.v_buffers, slots, layout, out, flag, **options)
        else:
            encode(rows.k_buffers, rows.v_buffers, slots, layout, out, flag, **options)

    def _decode(self, rows: _Rows, slots: torch.Tensor, layout: Layout, begin: int, memory: torch.Tensor) -> None:
        stored, options = memory.view(len(rows.k_buffers), -1), _LaunchOptions(table=rows.table, backend=self._backend)
        if isinstance(layout, LosslessLayout):
            lossless_codec.decode(rows.k_buffers, rows.v_buffers, slots, layout, stored, begin, **options)
        else:
            decode(rows.k_buffers, rows.v_buffers, slots, layout, stored, begin, **options)

    def _scratch_of_thread(self, kernels: Stream) -> _Scratch:
        scratch: _Scratch | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            memory = [torch.empty(self._half_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
            # The allocator may have taken it from something that this stream is still to use.
            halves = [_Half(half, kernels.event()) for half in memory]
            self._threads.scratch = scratch = _Scratch(self._streams.another(), halves)
        return scratch


class CudaStreams:
    """Streams of a CUDA device behind that protocol."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return _TorchStream(torch.cuda.current_stream(self._device), is_current=True)

    def another(self) -> Stream:
        return _TorchStream(torch.cuda.Stream(self._device))


class _TorchStream:
    def __init__(self, stream: Any, *, is_current: bool = False) -> None:
        self._stream, self._is_current = stream, is_current

    def run(self, work: Callable[[], None]) -> None:
        with nullcontext() if self._is_current else torch.cuda.stream(self._stream):
            work()

    def event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)
