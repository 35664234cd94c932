"""The host tier: how fast KV gets into its arena and out again beside plain memcpy, and what 10^5 entries cost."""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from evicbench.report import Line
from evicbench.tiers.inputs import SHAPE_8B, make_header, one_thread, take
from sglang_evicpress.tiers.entry.copies import HostEntry
from sglang_evicpress.tiers.entry.header import Extent
from sglang_evicpress.tiers.host.allocator import Extents, Run
from sglang_evicpress.tiers.host.arena import Arena

MB = 1 << 20
SIZES = (1 * MB, 4 * MB, 16 * MB, 64 * MB)
ROUND_BYTES = 64 * MB
NUM_PAIRS = 16
SPAN_BYTES = 512 * MB
"""KV and arena are walked through from end to end: nothing copied is in a cache from the time before."""
SHARE = 0.85
NUM_ENTRIES = 100_000
NUM_LOOKUPS = 100_000
TOKENS = 64


@dataclass(slots=True)
class Copies:
    """``kv`` is the memory of a pool, ``entries`` are the runs that the whole arena was handed out in."""

    arena: Arena
    kv: torch.Tensor
    size: int
    entries: Sequence[Sequence[Run]] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = [take(self.arena.extents, self.size) for _ in range(SPAN_BYTES // self.size)]

    def memcpy(self, number: int, is_in: bool) -> None:
        arena, kv = self.arena.data.numpy(), self.kv.numpy()
        for entry in self._round(number):
            begin = entry * self.size
            pair = arena[begin : begin + self.size], kv[begin : begin + self.size]
            np.copyto(*pair if is_in else pair[::-1])

    def ours(self, number: int, is_in: bool) -> None:
        for entry in self._round(number):
            begin = entry * self.size
            for piece in self.arena.tensors(self.entries[entry], 0, self.size):
                part = self.kv[begin : begin + len(piece)]
                if is_in:
                    piece.copy_(part)
                else:
                    part.copy_(piece)
                begin += len(piece)

    def _round(self, number: int) -> range:
        """The entries of one round, ROUND_BYTES of them."""
        count = ROUND_BYTES // self.size
        begin = number * count % len(self.entries)
        return range(begin, begin + count)


def measure() -> Iterator[Line]:
    with one_thread():
        yield from measure_copies()
    yield from measure_entries()


def measure_copies() -> Iterator[Line]:
    """Rounds come in pairs, memcpy and ours, now one first and now the other; the median of the pairs' ratios."""
    arena = Arena(SPAN_BYTES, step_bytes=SPAN_BYTES)
    kv = torch.randint(0, 256, (SPAN_BYTES,), dtype=torch.uint8)
    arena.data.copy_(kv)
    found: dict[bool, list[tuple[int, float, float]]] = {True: [], False: []}
    for size in SIZES:
        copies = Copies(arena, kv, size)
        for is_in in (True, False):
            found[is_in].append((size, *compare(copies, is_in)))
        for runs in copies.entries:
            arena.extents.free(runs)
    arena.close()
    for is_in, figures in found.items():
        yield Line(
            f"copy {'into' if is_in else 'out of'} the host arena",
            f">= {SHARE:.0%} of numpy's memcpy at every size, the copy alone",
            ", ".join(f"{size // MB} MB {share:.0%} ({rate / 1e9:.1f} GB/s)" for size, share, rate in figures),
            min(share for _, share, _ in figures) >= SHARE,
        )


def compare(copies: Copies, is_in: bool) -> tuple[float, float]:
    """Our share of memcpy's rate, and our bytes per second, both of processor time: others' turns do not count."""
    copied = (copies.arena.data if is_in else copies.kv)[:ROUND_BYTES]
    copied.zero_()
    copies.ours(0, is_in)
    if not torch.equal(copies.arena.data[:ROUND_BYTES], copies.kv[:ROUND_BYTES]) or not copied.any():
        raise RuntimeError("what was copied is not what is there")
    ratios, seconds = [], []
    for number in range(-1, NUM_PAIRS):
        ways = [copies.memcpy, copies.ours] if number % 2 else [copies.ours, copies.memcpy]
        took = {}
        for turn, way in enumerate(ways):
            begin = time.thread_time()
            way(2 * number + turn, is_in)
            took[way.__name__] = time.thread_time() - begin
        if number >= 0:  # the first warms up
            ratios.append(took["memcpy"] / took["ours"])
            seconds.append(took["ours"])
    return statistics.median(ratios), ROUND_BYTES / statistics.median(seconds)


def make_entries(count: int) -> tuple[Extents, dict[bytes, HostEntry]]:
    """Entries of 8B nodes by their keys; only their book-keeping, no memory."""
    draw, entries, size = random.Random(0), {}, SHAPE_8B.layer_bytes(TOKENS)
    extents = Extents(count * SHAPE_8B.num_layers * size)
    for node in range(count):
        layers = tuple(Extent(layer * size, size, draw.randbytes(16)) for layer in range(SHAPE_8B.num_layers))
        header = make_header(draw, SHAPE_8B, TOKENS, layers)
        entries[header.key] = HostEntry(header, take(extents, SHAPE_8B.num_layers * size), {node})
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
    middle = time.thread_time()
    for key in keys:
        entry = entries[key]
        extents.free(entry.runs)
        entry.runs = take(extents, entry.header.payload_bytes)
    found_us, moved_us = 1e6 * (middle - begin) / NUM_LOOKUPS, 1e6 * (time.thread_time() - middle) / NUM_LOOKUPS
    yield Line(
        f"{what}: look one up; let one go and take as much again",
        "< 20 us each",
        f"{found_us:.2f} us; {moved_us:.1f} us",
        max(found_us, moved_us) < 20.0,
    )
