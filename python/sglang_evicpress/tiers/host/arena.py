"""Host memory of the cache: addresses whose memory is taken in steps, and from which entries get runs of bytes."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from sglang_evicpress.tiers.host.allocator import GRANULE, MAX_RUNS, Extents, Run
from sglang_evicpress.tiers.host.memory import read_memory

logger = logging.getLogger(__name__)

STEP_BYTES = 256 << 20
"""Memory that is taken, and pinned, at a time; no piece of an entry lies in two of these."""
AHEAD_SHARE = 8  # an eighth of the arena, and at least a step, is taken ahead of need
RETRY_S = 30.0  # after a step that could not be had


class Arena:
    """Page-aligned private memory; a forked child does not get it.

    ``data`` is all of its addresses, uint8 [bytes]. The first step is there at once, touched as it is used, or pinned;
    each other is touched and pinned on a thread before it is needed. ``alloc`` gives out what is there. A step that
    cannot be had leaves an arena of that size, which tries again later. Raises ValueError for less than one granule,
    and RuntimeError when so much memory cannot be had or the first step cannot be pinned. All but the thread's work is
    for one thread at a time.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        is_pinned: bool = False,
        granule: int = GRANULE,
        max_runs: int = MAX_RUNS,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._step_bytes = step_bytes - step_bytes % granule
        self.extents = Extents(min(num_bytes, self._step_bytes), granule, max_runs)
        self._whole_bytes = num_bytes - num_bytes % granule
        self._taken_bytes = self._wanted_bytes = self.extents.num_bytes
        self._pinned: list[int] = []  # addresses of pinned steps
        self._thread: threading.Thread | None = None
        self._retry_s: float | None = None  # when a step could not be had: when to try again
        self.num_failed = 0
        self.is_pinned, self.is_closed = is_pinned, False
        has_device = is_pinned and torch.cuda.is_initialized()
        self._device = torch.cuda.current_device() if has_device else None  # a thread's own would be the first one
        memory = read_memory()
        refusal = f"host memory of {num_bytes} bytes cannot be had, {memory.free} bytes are available"
        if num_bytes > memory.free:  # the kernel would promise it, and kill the process when it is touched
            raise RuntimeError(refusal)
        self._kept_free = min(memory.reserve, memory.free - num_bytes)
        try:
            self._mmap = mmap.mmap(-1, self._whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise RuntimeError(f"{refusal}: {error}") from error
        _advise(self._mmap, mmap.MADV_HUGEPAGE)
        _advise(self._mmap, mmap.MADV_DONTFORK)  # a child's copy-on-write would move pages under a running transfer
        # numpy keeps the mapping from being closed under a tensor; torch.frombuffer would not.
        self.data = torch.from_numpy(np.frombuffer(self._mmap, dtype=np.uint8))
        self._bytes = memoryview(self._mmap)
        try:
            self._pin_step(self.data[: self._taken_bytes])
        except RuntimeError:
            self.close()
            raise
        self._want_ahead(0)

    @property
    def is_growing(self) -> bool:
        """True while more memory is on its way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_bytes(self) -> int:
        """Bytes that there are or will be: after a step that could not be had, those that there are."""
        return self._whole_bytes if self._retry_s is None else self.extents.num_bytes

    def alloc(self, num_bytes: int) -> tuple[Run, ...] | None:
        """Runs of memory, as ``Extents.alloc``; None also while what is still to be taken is not there yet."""
        extents = self.extents
        if self._taken_bytes > extents.num_bytes:
            extents.grow(self._taken_bytes)
        runs = extents.alloc(num_bytes)
        if extents.num_bytes < self._whole_bytes:
            self._want_ahead(num_bytes)
        return runs

    def _want_ahead(self, num_bytes: int) -> None:
        ahead = max(self._step_bytes, self._whole_bytes // AHEAD_SHARE)
        self._wanted_bytes = min(self.extents.used_bytes + max(num_bytes, ahead), self._whole_bytes)
        if self._wanted_bytes > self.extents.num_bytes:
            self._begin_growth()

    def join_growth(self) -> None:
        """Wait for the steps that are on their way."""
        if self._thread is not None:
            self._thread.join()

    def buffers(self, runs: Sequence[Run], offset: int, num_bytes: int) -> list[memoryview]:
        """Writable pieces that spell the payload's bytes [offset, offset + num_bytes).

        Raises ValueError outside the runs and when the arena is closed.
        """
        memory = self._bytes
        return [memory[begin:end] for begin, end in self._pieces(runs, offset, num_bytes)]

    def tensors(self, runs: Sequence[Run], offset: int, num_bytes: int) -> list[torch.Tensor]:
        """The same bytes as uint8 views, the same errors."""
        data = self.data
        return [data[begin:end] for begin, end in self._pieces(runs, offset, num_bytes)]

    def close(self) -> None:
        """Unpin and give the memory back; what still has views into it keeps it until these are gone."""
        if self.is_closed:
            return
        self.is_closed = True
        self.join_growth()
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())
        self.data = torch.empty(0, dtype=torch.uint8)
        self._bytes.release()
        try:
            self._mmap.close()
        except BufferError:
            return  # someone still has a view

    def _begin_growth(self) -> None:
        if self.is_growing:
            return  # it sees what is wanted
        if self._retry_s is None or time.monotonic() >= self._retry_s:
            self._thread = threading.Thread(target=self._grow, name="evicpress-host-growth", daemon=True)
            self._thread.start()

    def _grow(self) -> None:
        """Take steps until there is what is wanted, or one cannot be had."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while self._taken_bytes < self._wanted_bytes and not self.is_closed:
            try:
                free = read_memory().free - self._kept_free
                if free < min(self._step_bytes, self._whole_bytes - self._taken_bytes):
                    raise RuntimeError(f"{free} bytes are free beyond the {self._kept_free} that stay so")
                self._take_step()
            except RuntimeError as error:
                self.num_failed += 1
                if self._retry_s is None:
                    logger.warning("evicpress: host memory stays at %d bytes for now: %s", self._taken_bytes, error)
                self._retry_s = time.monotonic() + RETRY_S
                return
            self._retry_s = None

    def _take_step(self) -> None:
        """Touch the next step's pages, and pin them; numpy, unlike madvise, lets other threads run meanwhile."""
        begin, end = self._taken_bytes, min(self._taken_bytes + self._step_bytes, self._whole_bytes)
        step = self.data[begin:end]
        step.numpy()[:: mmap.PAGESIZE] = 0
        self._pin_step(step)
        self._taken_bytes = end

    def _pin_step(self, step: torch.Tensor) -> None:
        if self.is_pinned:
            _pin(step)
            self._pinned.append(step.data_ptr())

    def _pieces(self, runs: Sequence[Run], offset: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """(begin, end) in the arena of the payload's bytes [offset, offset + num_bytes), cut where a step ends: a copy
        between a device and memory that was pinned in two goes is refused."""
        if self.is_closed:
            raise ValueError("the arena is closed")
        if offset < 0 or num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes at offset {offset}: neither may be negative")
        left, step_bytes = num_bytes, self._step_bytes
        for run_begin, size in runs:
            if not left:
                return
            if offset >= size:
                offset -= size
                continue
            begin, end = run_begin + offset, run_begin + min(size, offset + left)
            left -= end - begin
            offset = 0
            while begin < end:
                cut = min(end, begin - begin % step_bytes + step_bytes)
                yield begin, cut
                begin = cut
        if left:
            raise ValueError(f"{num_bytes} bytes are asked for, the runs end {left} bytes before")


def write_pieces(pieces: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """Copy uint8 [n] into pieces of n bytes in all. From a device to a pinned arena nobody waits for it."""
    begin = 0
    for piece in pieces:
        piece.copy_(source[begin : begin + len(piece)], non_blocking=True)
        begin += len(piece)


def read_pieces(pieces: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """The other way."""
    begin = 0
    for piece in pieces:
        target[begin : begin + len(piece)].copy_(piece, non_blocking=True)
        begin += len(piece)


def _advise(memory: mmap.mmap, option: int) -> bool:
    """True if the kernel knows this advice; without it the memory works all the same."""
    try:
        memory.madvise(option)
    except OSError:
        return False
    return True


def _pin(data: torch.Tensor) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("host memory cannot be pinned: there is no CUDA device")
    status = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"{data.numel()} bytes of host memory cannot be pinned: CUDA error {int(status)}")
