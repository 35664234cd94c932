"""Bandwidth of the SSD tier beside the same bytes through plain sequential IO in the same folder.

Rounds are paired: in each one ours and the other follow one another on the same disk, now one first and now the other,
and the ratio is taken within the round. The median of the ratios is what counts.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from evicbench.report import Line
from evicbench.tiers.inputs import FINGERPRINT, SHAPE_8B, checksums, make_header, scratch
from evicbench.tiers.overhead import measure_overhead
from evicbench.tiers.peer import measure_peer
from evicbench.tiers.plain import read_blocks, run_dd, run_fio, write_blocks
from sglang_evicpress.tiers.entry.encoding import Extent
from sglang_evicpress.tiers.host.arena import Arena, Run
from sglang_evicpress.tiers.ssd.store import Ref, SsdStore

NUM_TOKENS = 768
NUM_BYTES = SHAPE_8B.num_layers * SHAPE_8B.layer_bytes(NUM_TOKENS)  # 96 MiB
NUM_ROUNDS = 24
SHARE = 0.85
DISK_BYTES = 4 << 30


@dataclass(slots=True)
class Rounds:
    """Seconds of each way, one per round; none of a tool that is not installed.

    ``serial``: ours, where nobody else computes the checksums meanwhile.
    """

    ours: list[float] = field(default_factory=list)
    serial: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    dd: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    def line(self, what: str) -> Line:
        share = self._share(self.ours)
        figure = (
            f"{share:.0%}, the median of {len(self.ours)} paired rounds: {self._rate('ours')}, {self._rate('loop')}"
        )
        figure += f"; {self._rate('dd')}, {self._rate('fio')}"
        if self.serial:
            figure += f"; first the checksums, then the write: {self._share(self.serial):.0%}, {self._rate('serial')}"
        return Line(what, f">= {SHARE:.0%} of a sequential O_DIRECT loop", figure, share >= SHARE)

    def _share(self, seconds: Sequence[float]) -> float:
        return statistics.median(loop / own for own, loop in zip(seconds, self.loop, strict=True))

    def _rate(self, name: str) -> str:
        seconds = getattr(self, name)
        if not seconds:
            return f"{name} is not installed"
        median, best = NUM_BYTES / statistics.median(seconds) / 1e9, NUM_BYTES / min(seconds) / 1e9
        return f"{name} {median:.2f} GB/s (best {best:.2f})"


def measure_bandwidth(num_rounds: int = NUM_ROUNDS, *, with_others: bool = True) -> Iterator[Line]:
    with scratch(DISK_BYTES) as folder:
        arena = Arena(2 * NUM_BYTES)
        arena.data.copy_(torch.randint(0, 256, (arena.num_bytes,), dtype=torch.uint8))
        store = SsdStore(folder / "ours", DISK_BYTES // 2, FINGERPRINT)
        try:
            yield from measure_sequential(store, arena, folder, num_rounds)
            if with_others:
                yield from measure_overhead(store, arena, folder)
                yield from measure_peer(store, arena, folder)
        finally:
            store.close()
            arena.close()


def measure_sequential(store: SsdStore, arena: Arena, folder: Path, num_rounds: int) -> Iterator[Line]:
    """One entry of 96 MiB after the other, written and read back; the same bytes through a loop, dd and fio.

    In a stream of demotions one worker computes an entry's checksums, as it copies it, while another writes the entry
    before; so does ``ours``.
    """
    source, target = arena.extents.alloc(NUM_BYTES), arena.extents.alloc(NUM_BYTES)
    if source is None or target is None:
        raise RuntimeError("the arena is too small")
    (memory,), (memory_read,) = arena.buffers(source, 0, NUM_BYTES), arena.buffers(target, 0, NUM_BYTES)
    draw = random.Random(0)
    writes, reads = Rounds(), Rounds()
    with ThreadPoolExecutor(1) as worker:
        for number in range(-2, num_rounds):
            if number == 0:  # the rounds before warm up
                writes, reads = Rounds(), Rounds()
            written = _Round(store, arena, source, target, worker, draw)
            path = folder / f"plain-{number}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                loop = partial(write_blocks, file, memory)
                _time(writes, number, {"ours": written.write, "serial": written.write_in_series, "loop": loop})
                store.sync()  # between the rounds, so that no write-back runs under the next
                os.fdatasync(file)
                loop = partial(read_blocks, file, memory_read)
                check = partial(_check_and_clear, memory, memory_read)
                _time(reads, number, {"ours": written.read, "loop": loop}, check)
            finally:
                os.close(file)
            for rounds, is_write in ((writes, True), (reads, False)):
                rounds.dd += run_dd(path, NUM_BYTES, is_write)
                if number % 4 == 0:
                    rounds.fio += run_fio(path, NUM_BYTES, is_write)
            path.unlink()
            written.remove()
    arena.extents.free(source)
    arena.extents.free(target)
    entry = f"entry of {NUM_BYTES / 1e6:.0f} MB in {SHAPE_8B.num_layers} layers"
    yield writes.line(f"SSD write with checksums and header, {entry}")
    yield reads.line(f"SSD read with every checksum verified, {entry}")


class _Round:
    """The same entry written twice, and read."""

    def __init__(
        self,
        store: SsdStore,
        arena: Arena,
        source: Sequence[Run],
        target: Sequence[Run],
        worker: Executor,
        draw: random.Random,
    ) -> None:
        self._store, self._worker, self._draw = store, worker, draw
        self._chunks = arena.buffers(source, 0, NUM_BYTES)
        self._target = arena.buffers(target, 0, NUM_BYTES)
        self._checksums = partial(checksums, arena, source, SHAPE_8B, NUM_TOKENS)
        self._extents = self._checksums()
        self._refs: list[Ref] = []

    def write(self) -> None:
        following = self._worker.submit(self._checksums)
        self._write(self._extents)
        following.result()

    def write_in_series(self) -> None:
        self._write(self._checksums())

    def read(self) -> None:
        header = self._store.read_header(self._refs[0])
        self._store.read(self._refs[0], header, self._target)

    def remove(self) -> None:
        for ref in self._refs:
            self._store.remove(ref)
        self._store.reclaim()

    def _write(self, extents: tuple[Extent, ...]) -> None:
        reservation = self._store.reserve(NUM_BYTES)
        if reservation is None:
            raise RuntimeError(f"no room: {self._store.used_bytes} of {self._store.capacity_bytes} bytes are used")
        header = make_header(self._draw, SHAPE_8B, NUM_TOKENS, extents)
        self._refs.append(self._store.write(reservation, header, self._chunks))


def _time(
    rounds: Rounds, number: int, actions: Mapping[str, Callable[[], object]], check: Callable[[], object] | None = None
) -> None:
    """Every action once, another one first in every round; ``check`` follows each."""
    names = list(actions)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        begin = time.perf_counter()
        actions[name]()
        getattr(rounds, name).append(time.perf_counter() - begin)
        if check is not None:
            check()


def _check_and_clear(expected: memoryview, found: memoryview) -> None:
    """A byte in every 4096: the pieces of either reader are larger."""
    if found[::4096] != expected[::4096]:
        raise RuntimeError("what was read is not what was written")
    found[::4096] = bytes(len(found) // 4096)
