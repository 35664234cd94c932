"""KV between SGLang's pool and an entry's payload: gather, check and scatter.

A payload holds, for each layer in order, the K rows then the V rows of the entry's slots, contiguous, or what a codec
makes of them; for a press one more extent: the survivors' positions, int32 [layers, heads, slots], then their logical
indices, int32 [slots]. ``header.py`` says how it is where layers fill different numbers of slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang_evicpress.codec.layout import BITS, LOSSLESS
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import EMPTY, Filling, SurvivorLayout
from sglang_evicpress.tiers.entry.header import BadEntry, Extent, Shape, coder_of, extent_of
from sglang_evicpress.tiers.host.allocator import Run
from sglang_evicpress.tiers.host.arena import Arena, read_pieces, write_pieces
from sglang_evicpress.tiers.transfers import CudaStreams, Transfers

WORD_BYTES = 8
"""Alignment of stored bytes that codecs can read where they lie."""


class PayloadCopier:
    """Moves payloads between the buffers of a KV pool, [slots, heads, head_dim] per layer, and an arena.

    Every call may run on a worker thread. On CUDA each thread has a stream of its own; ``after`` is then an event that
    the copy has to wait for. What is saved or written has arrived when the call returns, what is loaded or read has
    when the stream has done it, and until then its runs must stay. ``transfers``: how it goes between the pool's
    device and the arena; without it over CUDA's streams, and where the pool is on the CPU in place. Kernels
    of ``codecs`` are compiled at once.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        page_size: int,
        *,
        transfers: Transfers | None = None,
        codecs: Iterable[str] = (),
    ) -> None:
        self._buffers = [tuple(pair) for pair in zip(k_buffers, v_buffers, strict=True)]
        self._streams = threading.local()
        first = k_buffers[0]
        self.shape = Shape.of(k_buffers, page_size)
        self.num_layers = len(self._buffers)
        self._device = first.device
        self._is_cuda = first.is_cuda
        self._transfers = transfers
        if self._is_cuda and transfers is None:
            self._transfers = Transfers(k_buffers, v_buffers, CudaStreams(self._device))
            self._transfers.compile(
                codec for codec in codecs if self._has_kernels(codec) and self.shape.can_be_stored(codec)
            )

    def sizes(self, num_slots: int, is_pressed: bool, codec: str = "raw", layer_slots: Sequence[int] = ()) -> list[int]:
        """Bytes of every extent."""
        return self.shape.extent_sizes(num_slots, codec, is_pressed=is_pressed, layer_slots=layer_slots)

    def save(
        self,
        slots: torch.Tensor,
        layout: SurvivorLayout | None,
        arena: Arena,
        runs: Sequence[Run],
        after: Any = None,
        codec: str = "raw",
    ) -> tuple[Extent, ...]:
        """Copy the KV of ``slots`` [n] into ``runs``; the extents carry the checksums of what is there now. Raises
        NotFiniteError for KV with NaN or Inf, which no codec stores, and DoesNotFitError as the codec does."""
        with self.stream(after):
            is_even = layout is None or layout.filling is None
            if is_even and (codec == "raw" or self._has_kernels(codec)):
                return self.begin_save(slots, layout, arena, runs, codec)()
            rows = (self._rows_of(layer, slots, layout) for layer in range(self.num_layers))
            return self._save_coded(rows, layout, arena, runs, codec)

    @property
    def is_by_threads(self) -> bool:
        """True if a call has copied when it returns: the pool is memory of the host, and no device takes part."""
        return self._transfers is None

    def is_in_place(self, codec: str) -> bool:
        """True if a save is there when it is begun: where the pool is memory of the host, and nothing is encoded."""
        return self.is_by_threads and codec == "raw"

    def begin_save(
        self, slots: torch.Tensor, layout: SurvivorLayout | None, arena: Arena, runs: Sequence[Run], codec: str = "raw"
    ) -> Callable[[], tuple[Extent, ...]]:
        """Begin to copy the KV of ``slots`` [n] into ``runs`` in this thread's lane: what is queued there next may
        overwrite them. Returns what waits for it, on any thread, and returns the extents. What is to be encoded without
        a kernel, or of which layers fill different slots, is only put aside now, on the pool's device."""
        transfers = self._transfers
        is_uneven = layout is not None and layout.filling is not None
        if is_uneven or (codec != "raw" and not self._has_kernels(codec)):
            aside = [self._rows_of(layer, slots, layout) for layer in range(self.num_layers)]
            here = self.event(is_timed=False)

            def encode() -> tuple[Extent, ...]:
                with self.stream(here):
                    return self._save_coded(aside, layout, arena, runs, codec)

            return encode
        queued = None
        if transfers is not None:
            queue = transfers.queue_save if codec == "raw" else partial(transfers.queue_encode, codec=codec)
            queued = queue(slots, arena, runs)
        saved = self._save(slots, arena, runs) if queued is None else []

        def finish() -> tuple[Extent, ...]:
            extents = saved if queued is None else queued.finish()
            if layout is not None:
                extents.append(self.write_layout(layout, arena, runs, extents[-1].offset + extents[-1].num_bytes))
            return tuple(extents)

        return finish

    def read_layer(
        self,
        layer: int,
        arena: Arena,
        runs: Sequence[Run],
        extent: Extent,
        begin: int,
        count: int,
        num_slots: int,
        codec: str = "raw",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [count, heads, head_dim] each, of rows [begin, begin + count) of a layer of an entry of
        ``num_slots``: on the pool's device, and on the CPU perhaps the arena's own memory."""
        if codec != "raw":
            return self._decoded(layer, arena, runs, extent, begin, count, num_slots, codec)
        pair, offset = [], extent.offset
        for buffer in self._buffers[layer]:
            at = offset + begin * _row_bytes(buffer)
            if self._is_cuda:
                rows = torch.empty((count, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
                pieces = arena.tensors(runs, at, count * _row_bytes(buffer))
                read_pieces(pieces, rows.view(-1).view(torch.uint8))
            else:
                rows = _rows(buffer, arena, runs, at, count)
            pair.append(rows)
            offset += num_slots * _row_bytes(buffer)
        return pair[0], pair[1]

    def write_layer(
        self,
        pair: tuple[torch.Tensor, torch.Tensor],
        arena: Arena,
        runs: Sequence[Run],
        offset: int,
        stream: Any,
        codec: str = "raw",
    ) -> Extent:
        """Put K and V rows, [slots, heads, head_dim] each, where a payload has one layer; within ``stream``."""
        if self._transfers is not None and self._has_kernels(codec):
            keys, values = (rows.contiguous() for rows in pair)
            slots = torch.arange(len(keys), device=self._device)
            queued = self._transfers.queue_encode(slots, arena, runs, codec, pair=(keys, values), offset=offset)
            return queued.finish()[0]
        begin = offset
        for rows in pair if codec == "raw" else (self._encoded(pair, codec),):
            flat = rows.contiguous().view(-1).view(torch.uint8)
            write_pieces(arena.tensors(runs, begin, len(flat)), flat)
            begin += len(flat)
        if stream is not None:
            stream.synchronize()
        return extent_of(offset, arena.buffers(runs, offset, begin - offset))

    def write_layout(self, layout: SurvivorLayout, arena: Arena, runs: Sequence[Run], offset: int) -> Extent:
        """Put the last extent of a lossy payload where it is to be."""
        parts = [layout.positions.reshape(-1), layout.logical.to(torch.int32)]
        if layout.layer_slots:
            parts[:1] = [layout.positions_of(layer).reshape(-1) for layer in range(self.num_layers)]
        numbers = torch.cat(parts).view(torch.uint8)
        if layout.layer_slots:
            numbers = torch.cat([numbers, _filled_bits(layout)])
        write_pieces(arena.tensors(runs, offset, len(numbers)), numbers)
        return extent_of(offset, arena.buffers(runs, offset, len(numbers)))

    def layers_at_once(self, slots: int, begin: int, num_slots: int, codec: str = "raw") -> int:
        """How many layers of an entry of ``num_slots`` are best loaded at a time, of each rows [begin, begin + slots):
        on a device every launch takes time from whoever queues the pass that waits for it."""
        is_whole = begin == 0 and slots == num_slots
        if self._transfers is None or not slots or not (codec == "raw" or (self._has_kernels(codec) and is_whole)):
            return 1
        return self._transfers.layers_at_once(slots, codec)

    def load_layers(
        self,
        layers: range,
        slots: torch.Tensor,
        arena: Arena,
        runs: Sequence[Run],
        extents: Sequence[Extent],
        begin: int,
        num_slots: int,
        codec: str = "raw",
    ) -> None:
        """Put rows [begin, begin + len(slots)) of layers of an entry of ``num_slots`` into ``slots``: of one layer, or
        of as many as ``layers_at_once``, which all have as many bytes."""
        if not len(slots):
            return
        extent = extents[layers.start]
        if self._transfers is not None and self._has_kernels(codec):
            self._transfers.decode(layers, slots, arena, runs, extent, begin, num_slots, codec)
            return
        if self._transfers is not None and codec == "raw":
            self._transfers.load(layers, slots, arena, runs, extent.offset, begin, num_slots)
            return
        for layer in layers:
            self._load_layer(layer, slots, arena, runs, extents[layer], begin, num_slots, codec)

    def _load_layer(
        self,
        layer: int,
        slots: torch.Tensor,
        arena: Arena,
        runs: Sequence[Run],
        extent: Extent,
        begin: int,
        num_slots: int,
        codec: str,
    ) -> None:
        if codec != "raw":
            decoded = self._decoded(layer, arena, runs, extent, begin, len(slots), num_slots, codec)
            for buffer, rows in zip(self._buffers[layer], decoded, strict=True):
                if self._is_cuda:
                    buffer.index_copy_(0, slots, rows)
                else:
                    _words(buffer)[_selector(slots)] = _words(rows)  # half of index_copy_'s time
            return
        offset = extent.offset
        for buffer in self._buffers[layer]:
            row = _row_bytes(buffer)
            rows = _rows(buffer, arena, runs, offset + begin * row, len(slots))
            _words(buffer)[_selector(slots)] = _words(rows)
            offset += num_slots * row

    def finish_layers(self) -> Any:
        """Event for waiters on the device: once it is reached, the layers loaded by this thread are there; an event on
        CUDA, nothing on the CPU."""
        return self.event(is_timed=False)

    def event(self, *, is_timed: bool = True) -> Any:
        """A point in what this thread's copies have queued, for ``seconds_between``; None on the CPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(torch.cuda.current_stream())
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Seconds of the device from one mark to the next; both were reached."""
        return float(begin.elapsed_time(end)) / 1e3

    def stream(self, after: Any, *, is_awaited: bool = True) -> Any:
        """A context in which this thread's copies run, behind ``after``. They are done when it ends, however it does,
        or unless it ``is_awaited`` only queued."""
        return _CudaStream(self._streams, self._device, after, is_awaited) if self._is_cuda else nullcontext()

    def _has_kernels(self, codec: str) -> bool:
        """True if kernels encode and decode it between the pool's device and the arena."""
        return self._transfers is not None and (codec in BITS or codec == LOSSLESS)

    def _rows_of(
        self, layer: int, slots: torch.Tensor, layout: SurvivorLayout | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the slots that a layer fills."""
        if layout is not None and layout.filling is not None:
            slots = slots[layout.filling.index_of(layout.filling.group_of[layer], slots.device)]
        keys, values = (buffer.index_select(0, slots) for buffer in self._buffers[layer])
        return keys, values

    def _save_coded(
        self,
        rows: Iterable[tuple[torch.Tensor, torch.Tensor]],
        layout: SurvivorLayout | None,
        arena: Arena,
        runs: Sequence[Run],
        codec: str,
    ) -> tuple[Extent, ...]:
        stream = torch.cuda.current_stream(self._device) if self._is_cuda else None
        extents, offset = [], 0
        for pair in rows:
            extents.append(self.write_layer(pair, arena, runs, offset, stream, codec))
            offset += extents[-1].num_bytes
        if layout is not None:
            extents.append(self.write_layout(layout, arena, runs, offset))
        return tuple(extents)

    def _encoded(self, pair: tuple[torch.Tensor, torch.Tensor], codec: str) -> torch.Tensor:
        keys, values = (rows.flatten(1) for rows in pair)
        stored = torch.empty(self.shape.stored_bytes(len(keys), codec), dtype=torch.uint8, device=keys.device)
        coder_of(codec).encode(keys, values, stored)
        return stored

    def _decoded(
        self,
        layer: int,
        arena: Arena,
        runs: Sequence[Run],
        extent: Extent,
        begin: int,
        count: int,
        num_slots: int,
        codec: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        like = self._buffers[layer][0]
        keys, values = (like.new_empty((count, *like.shape[1:])) for _ in range(2))
        if self._transfers is not None and self._has_kernels(codec):
            slots = torch.arange(count, device=self._device)
            self._transfers.decode((keys, values), slots, arena, runs, extent, begin, num_slots, codec)
            return keys, values
        pieces = arena.tensors(runs, extent.offset, extent.num_bytes)
        if len(pieces) == 1 and not self._is_cuda and pieces[0].data_ptr() % WORD_BYTES == 0:
            stored = pieces[0]  # where it lies: a piece of an entry needs a part of it
        else:
            stored = torch.empty(extent.num_bytes, dtype=torch.uint8, device=self._device)
            read_pieces(pieces, stored)
        coder_of(codec).decode(stored, num_slots, begin, keys.flatten(1), values.flatten(1))
        return keys, values

    def _save(self, slots: torch.Tensor, arena: Arena, runs: Sequence[Run]) -> list[Extent]:
        """One buffer after the other, in place where the arena has it in one run; for the CPU."""
        extents, offset = [], 0
        for pair in self._buffers:
            begin = offset
            for buffer in pair:
                num_bytes = len(slots) * _row_bytes(buffer)
                _gather(buffer, slots, arena.tensors(runs, offset, num_bytes))
                offset += num_bytes
            extents.append(extent_of(begin, arena.buffers(runs, begin, offset - begin)))
        return extents


class _CudaStream:
    """This thread's stream on the pool's device, made current; starts behind ``after``."""

    def __init__(self, local: threading.local, device: torch.device, after: Any, is_awaited: bool) -> None:
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream(device)  # a thread's own device is the first one
        self._stream = local.stream
        self._after = after
        self._is_awaited = is_awaited
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> Any:
        self._context.__enter__()
        if self._after is not None:
            self._stream.wait_event(self._after)
        return self._stream

    def __exit__(self, *error: object) -> None:
        try:
            if self._is_awaited:
                self._stream.synchronize()  # whoever gives away what is copied, after a failure too, does so later
        finally:
            self._context.__exit__(*error)


def layout_of(
    numbers: torch.Tensor,
    shape: Shape,
    num_slots: int,
    layer_slots: Sequence[int] = (),
    group_of: tuple[int, ...] = (),
) -> SurvivorLayout:
    """The survivors that the bytes ``numbers`` (uint8) of a lossy entry's last extent describe. ``layer_slots``: as in
    its header. ``group_of`` [layers]: the groups of layers that fill the same slots on this server. Raises BadEntry
    where they do not, or not as many as the header says."""
    if layer_slots:
        return _uneven_layout_of(numbers, shape, num_slots, layer_slots, group_of)
    values = numbers.contiguous().view(torch.int32)
    count = shape.num_layers * shape.num_heads * num_slots
    positions = values[:count].view(shape.num_layers, shape.num_heads, num_slots).clone()
    return SurvivorLayout(HostCopy(positions), HostCopy(values[count:].to(torch.int64)), num_slots)


def check_layout(layout: SurvivorLayout, start: int, num_tokens: int) -> None:
    """Raises BadEntry unless these can be the survivors of a node of so many tokens that begins at ``start``: shown at
    rising indices of its tokens, and of rising positions in each head, none behind its end."""
    logical = layout.logical
    is_sound = bool((logical.diff() > 0).all()) and not ((logical < 0) | (logical >= num_tokens)).any()
    for layer in range(layout.shape[0]):
        positions = layout.positions_of(layer)
        is_within = not ((positions < 0) | (positions >= start + num_tokens)).any()
        is_sound = is_sound and is_within and bool((positions.diff(dim=-1) > 0).all())
    if not is_sound:
        raise BadEntry("header", f"its survivors are not those of {num_tokens} tokens from {start} on")


def _uneven_layout_of(
    numbers: torch.Tensor, shape: Shape, num_slots: int, layer_slots: Sequence[int], group_of: tuple[int, ...]
) -> SurvivorLayout:
    bits_at = len(numbers) - shape.num_layers * ((num_slots + 7) // 8)
    bits = numbers[bits_at:].numpy().reshape(shape.num_layers, -1)
    filled = np.unpackbits(bits, axis=1, bitorder="little", count=num_slots)
    counts = filled.sum(axis=1).tolist()
    if counts != list(layer_slots):
        raise BadEntry("header", f"its layers fill {counts} slots: expected {list(layer_slots)}")
    if len(group_of) != shape.num_layers:
        raise BadEntry("identity", "its layers fill different slots, and those of this server's forms the same")
    places: list[torch.Tensor] = []
    for group in range(max(group_of) + 1):
        rows = filled[[layer for layer, each in enumerate(group_of) if each == group]]
        if not (rows == rows[0]).all():
            raise BadEntry("identity", "its layers fill different slots that fill the same ones in this server's forms")
        places.append(torch.from_numpy(np.flatnonzero(rows[0])))
    values = numbers[:bits_at].contiguous().view(torch.int32)
    positions = torch.full((shape.num_layers, shape.num_heads, num_slots), EMPTY, dtype=torch.int32)
    begin = 0
    for layer, count in enumerate(counts):
        end = begin + shape.num_heads * count
        positions[layer][:, places[group_of[layer]]] = values[begin:end].view(shape.num_heads, count)
        begin = end
    logical = HostCopy(values[begin:].to(torch.int64))
    return SurvivorLayout(HostCopy(positions), logical, num_slots, Filling(group_of, places))


def _filled_bits(layout: SurvivorLayout) -> torch.Tensor:
    """uint8 [layers * bytes]: a bit for each slot that a layer fills."""
    num_layers, _, num_slots = layout.shape
    filled = np.zeros((num_layers, num_slots), dtype=bool)
    for layer, row in enumerate(filled):
        if layout.filling is not None:
            row[layout.filling.of_layer(layer).numpy()] = True
    return torch.from_numpy(np.packbits(filled, axis=1, bitorder="little").reshape(-1))


def _rows(buffer: torch.Tensor, arena: Arena, runs: Sequence[Run], offset: int, count: int) -> torch.Tensor:
    """The rows of an arena from ``offset`` on, as ``buffer`` has them: [count, heads, head_dim]."""
    pieces = arena.tensors(runs, offset, count * _row_bytes(buffer))
    if not pieces:
        return torch.empty((0, *buffer.shape[1:]), dtype=buffer.dtype)
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return flat.view(buffer.dtype).view(-1, *buffer.shape[1:])


def _words(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """The rows [n, ...] as machine words [n, words], where they are."""
    num_bytes = rows.shape[1] * rows.shape[2] * rows.element_size()
    flat = rows.view(torch.uint8).view(len(rows), num_bytes).numpy()
    return flat.view(np.uint64) if num_bytes % 8 == 0 else flat


def _selector(slots: torch.Tensor) -> slice | np.ndarray[Any, Any]:
    """The slots, on the CPU, as a slice where they follow each other: then a copy is one block."""
    numbers: np.ndarray[Any, Any] = slots.numpy()
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1 and bool((np.diff(numbers) == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def _row_bytes(buffer: torch.Tensor) -> int:
    return int(buffer.shape[1] * buffer.shape[2] * buffer.element_size())


def _gather(buffer: torch.Tensor, slots: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """The rows of ``slots`` into pieces of an arena, on the CPU."""
    if len(pieces) != 1:
        write_pieces(pieces, buffer.index_select(0, slots).view(-1).view(torch.uint8))
        return
    rows = pieces[0].view(buffer.dtype).view(-1, *buffer.shape[1:])
    selector = _selector(slots)
    if isinstance(selector, slice):
        np.copyto(_words(rows), _words(buffer)[selector])
    else:
        torch.index_select(buffer, 0, slots, out=rows)
