"""The host tier: how fast KV gets into its arena and out again beside plain memcpy, and what 10^5 entries cost."""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from evicbench.report import Line
from evicbench.tiers.inputs import SHAPE_8B, make_header
from sglang_evicpress.tiers.entry.copies import HostEntry
from sglang_evicpress.tiers.entry.encoding import Extent
from sglang_evicpress.tiers.host.arena import Arena, Extents, Run

MB = 1 << 20
SIZES = (1 * MB, 4 * MB, 16 * MB, 64 * MB)
ROUND_BYTES = 64 * MB
NUM_PAIRS = 16
SPAN_BYTES = 512 * MB
"""KV and arena are walked through from end to end: nothing copied is in a cache from the time before."""
PIECE_BYTES = 512 << 10
SHARE = 0.85
NUM_ENTRIES = 100_000
NUM_LOOKUPS = 100_000
TOKENS = 64

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Copies:
    """``kv`` is the memory of a pool, ``entries`` are the runs that the whole arena was handed out in."""

    arena: Arena
    kv: torch.Tensor
    size: int
    entries: Sequence[Sequence[Run]] = field(init=False)

    def __post_init__(self) -> None:
        taken = [self.arena.extents.alloc(self.size) for _ in range(SPAN_BYTES // self.size)]
        self.entries = [runs for runs in taken if runs is not None]

    def free(self) -> None:
        for runs in self.entries:
            self.arena.extents.free(runs)

    def memcpy(self, number: int, is_in: bool) -> None:
        arena, kv = self.arena.data.numpy(), self.kv.numpy()
        for entry in self._round(number):
            begin = entry * self.size
            pair = arena[begin : begin + self.size], kv[begin : begin + self.size]
            np.copyto(*pair if is_in else pair[::-1])

    def plain(self, number: int, is_in: bool) -> None:
        for entry in self._round(number):
            begin = entry * self.size
            for piece in self.arena.tensors(self.entries[entry], 0, self.size):
                part = self.kv[begin : begin + len(piece)]
                if is_in:
                    piece.copy_(part)
                else:
                    part.copy_(piece)
                begin += len(piece)

    def hashed(self, number: int, is_in: bool) -> None:
        """Each piece is hashed at its source, which brings it into the second-level cache, and copied from there."""
        kv = self.kv.numpy()
        for entry in self._round(number):
            begin = entry * self.size
            digest = xxhash.xxh3_128()
            for tensor in self.arena.tensors(self.entries[entry], 0, self.size):
                run = tensor.numpy()
                for offset in range(0, len(run), PIECE_BYTES):
                    piece = run[offset : offset + PIECE_BYTES]
                    part = kv[begin : begin + len(piece)]
                    target, source = (piece, part) if is_in else (part, piece)
                    digest.update(source)
                    np.copyto(target, source)
                    begin += len(piece)
            digest.digest()

    def _round(self, number: int) -> range:
        """The entries of one round, ROUND_BYTES of them."""
        count = ROUND_BYTES // self.size
        begin = number * count % len(self.entries)
        return range(begin, begin + count)


def measure_host() -> Iterator[Line]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from measure_copies()
    finally:
        torch.set_num_threads(threads)
    yield from measure_entries()


def measure_copies() -> Iterator[Line]:
    """Rounds come in pairs, memcpy and ours, now one first and now the other; the median of the pairs' ratios."""
    arena = Arena(SPAN_BYTES)
    kv = torch.randint(0, 256, (SPAN_BYTES,), dtype=torch.uint8)
    arena.data.copy_(kv)
    ways = (("the copy", Copies.plain), ("with xxh3-128 of every byte besides", Copies.hashed))
    figures: dict[tuple[str, bool], list[str]] = {}
    shares: dict[tuple[str, bool], list[float]] = {}
    for size in SIZES:
        copies = Copies(arena, kv, size)
        for what, ours in ways:
            for is_in in (True, False):
                share, rate = compare(copies, ours, is_in)
                shares.setdefault((what, is_in), []).append(share)
                figures.setdefault((what, is_in), []).append(f"{size // MB} MB {share:.0%} ({rate / 1e9:.1f} GB/s)")
        copies.free()
    arena.close()
    for is_in in (True, False):
        yield Line(
            f"copy {'into' if is_in else 'out of'} the host arena",
            f">= {SHARE:.0%} of numpy's memcpy at every size, the copy alone",
            "; ".join(f"{what}: {', '.join(figures[what, is_in])}" for what, _ in ways),
            min(shares["the copy", is_in]) >= SHARE,
        )


def compare(copies: Copies, ours: Callable[[Copies, int, bool], None], is_in: bool) -> tuple[float, float]:
    """Our share of memcpy's rate, and our bytes per second, both of processor time: others' turns do not count."""
    copied = (copies.arena.data if is_in else copies.kv)[:ROUND_BYTES]
    copied.zero_()
    ours(copies, 0, is_in)
    if not torch.equal(copies.arena.data[:ROUND_BYTES], copies.kv[:ROUND_BYTES]) or not copied.any():
        raise RuntimeError("what was copied is not what is there")
    ratios, seconds = [], []
    for number in range(-1, NUM_PAIRS):
        ways = [Copies.memcpy, ours] if number % 2 else [ours, Copies.memcpy]
        took = {}
        for turn, way in enumerate(ways):
            begin = time.thread_time()
            way(copies, 2 * number + turn, is_in)
            took[way] = time.thread_time() - begin
        if number >= 0:  # the first warms up
            ratios.append(took[Copies.memcpy] / took[ours])
            seconds.append(took[ours])
    return statistics.median(ratios), ROUND_BYTES / statistics.median(seconds)


def make_entries(count: int) -> tuple[Extents, dict[bytes, HostEntry]]:
    """Entries of 8B nodes by their keys; only their book-keeping, no memory."""
    draw = random.Random(0)
    size = SHAPE_8B.layer_bytes(TOKENS)
    extents = Extents(count * SHAPE_8B.num_layers * size)
    entries = {}
    for node in range(count):
        runs = extents.alloc(SHAPE_8B.num_layers * size)
        if runs is None:
            raise RuntimeError("the arena is too small")
        layers = tuple(Extent(layer * size, size, draw.randbytes(16)) for layer in range(SHAPE_8B.num_layers))
        header = make_header(draw, SHAPE_8B, TOKENS, layers)
        entries[header.key] = HostEntry(header, runs, {node})
    return extents, entries


def measure_entries() -> Iterator[Line]:
    gc.collect()
    gc.disable()  # nothing here is garbage, and looking for it takes longer than all the rest
    tracemalloc.start()
    try:
        extents, entries = make_entries(NUM_ENTRIES)
        taken = tracemalloc.get_traced_memory()[0] / NUM_ENTRIES
    finally:
        tracemalloc.stop()
        gc.enable()
    payload = SHAPE_8B.num_layers * SHAPE_8B.layer_bytes(TOKENS)
    what = f"{NUM_ENTRIES:,} entries of {TOKENS} tokens and {SHAPE_8B.num_layers} checksums resident on the host"
    yield Line(
        f"{what}: memory of each beside its KV",
        "< 8,192 bytes",
        f"{taken:,.0f} bytes, {taken / payload:.3%} of its KV; {4 * TOKENS} are its tokens",
        taken < 8192,
    )
    keys = random.Random(1).choices(list(entries), k=NUM_LOOKUPS)
    begin = time.thread_time()
    for key in keys:
        entries[key]
    found_s = (time.thread_time() - begin) / NUM_LOOKUPS
    begin = time.thread_time()
    for key in keys:
        entry = entries[key]
        extents.free(entry.runs)
        runs = extents.alloc(entry.header.payload_bytes)
        if runs is None:
            raise RuntimeError("what was freed is not free")
        entry.runs = runs
    moved_s = (time.thread_time() - begin) / NUM_LOOKUPS
    yield Line(
        f"{what}: look one up; let one go and take as much again",
        "< 20 us each",
        f"{found_s * 1e6:.2f} us; {moved_s * 1e6:.1f} us",
        max(found_s, moved_s) < 20e-6,
    )
