"""Host memory of the cache: one block, taken and touched at the start, from which entries get runs of bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from sglang_evicpress.tiers.host.allocator import GRANULE, MAX_RUNS, Extents, Run

__all__ = ["GRANULE", "MAX_RUNS", "Arena", "Extents", "Run", "read_pieces", "write_pieces"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which the mmap module does not name yet


class Arena:
    """Page-aligned private memory; a forked child does not get it.

    ``data`` is all of it, uint8 [num_bytes]. Raises ValueError for less than one granule and RuntimeError when the
    memory cannot be had or cannot be pinned.
    """

    def __init__(
        self, num_bytes: int, *, is_pinned: bool = False, granule: int = GRANULE, max_runs: int = MAX_RUNS
    ) -> None:
        self.extents = Extents(num_bytes, granule, max_runs)
        self.is_pinned = False
        self.is_closed = False
        self._mmap = _take_memory(self.extents.num_bytes)
        # numpy keeps the mapping from being closed under a tensor; torch.frombuffer would not.
        self.data = torch.from_numpy(np.frombuffer(self._mmap, dtype=np.uint8))
        self._bytes = memoryview(self._mmap)
        if is_pinned:
            try:
                _pin(self.data)
            except RuntimeError:
                self.close()
                raise
            self.is_pinned = True

    @property
    def num_bytes(self) -> int:
        return self.extents.num_bytes

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
        if self.is_pinned:
            self.is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
        self.data = torch.empty(0, dtype=torch.uint8)
        self._bytes.release()
        try:
            self._mmap.close()
        except BufferError:
            return  # someone still has a view

    def _pieces(self, runs: Sequence[Run], offset: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """(begin, end) in the arena of the payload's bytes [offset, offset + num_bytes)."""
        if self.is_closed:
            raise ValueError("the arena is closed")
        if offset < 0 or num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes at offset {offset}: neither may be negative")
        left = num_bytes
        for begin, size in runs:
            if not left:
                return
            if offset < size:
                taken = min(size - offset, left)
                yield begin + offset, begin + offset + taken
                left -= taken
                offset = 0
            else:
                offset -= size
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


def _take_memory(num_bytes: int) -> mmap.mmap:
    """A populated anonymous mapping, in huge pages where the kernel has them; RuntimeError when there is too little."""
    available = _available_bytes()
    refusal = f"host memory of {num_bytes} bytes cannot be had, {available} bytes are available"
    if num_bytes > available:  # the kernel would promise it, and kill the process when it is touched
        raise RuntimeError(refusal)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise RuntimeError(f"{refusal}: {error}") from error
    _advise(memory, mmap.MADV_HUGEPAGE)
    _advise(memory, mmap.MADV_DONTFORK)  # a child's copy-on-write would move pages under a running transfer
    if not _advise(memory, _POPULATE_WRITE):
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return memory


def _advise(memory: mmap.mmap, option: int) -> bool:
    """True if the kernel knows this advice; without it the memory works all the same."""
    try:
        memory.madvise(option)
    except OSError:
        return False
    return True


def _available_bytes() -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, and no more than a container's limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        anonymous = int(Path("/sys/fs/cgroup/memory.stat").read_text().split(maxsplit=2)[1])  # first line: anon N
    except (OSError, IndexError, ValueError):
        return available  # no container, or no limit ("max")
    return min(available, max(0, limit - anonymous))


def _pin(data: torch.Tensor) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("host memory cannot be pinned: there is no CUDA device")
    status = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"{data.numel()} bytes of host memory cannot be pinned: CUDA error {int(status)}")
