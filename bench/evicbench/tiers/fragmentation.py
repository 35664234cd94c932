"""Fragmentation of the host arena after a million allocations and frees of a real trace's nodes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evicbench.policy.runs import SLOT_BYTES, trace_file
from evicbench.report import Line
from sglang_evicpress.tiers.host.allocator import Extents, Run
from sglang_evicpress.traces import Trace, read_trace

ARENA_BYTES = 256 << 30
NUM_OPS = 1_000_000
KEPT = (1.0, 0.8, 0.5, 0.2)
OPS_PER_SAMPLE = 1_000
MOST = 0.10


@dataclass(slots=True)
class Churn:
    """Entries of random nodes come; random ones go when more than ``high`` of the arena is used, until ``low`` is.

    At 1.0 each, entries go only when the next one does not fit: the arena is always full. ``lost``: what rounding adds
    to the entries, and the free bytes that one allocation could not get; as a share of the arena, as is ``used``.
    """

    extents: Extents
    high: float
    low: float
    live: list[tuple[Sequence[Run], int]] = field(default_factory=list)
    payload: int = 0
    num_runs: int = 0
    num_taken: int = 0
    num_dropped: int = 0
    lost: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def run(self, sizes: Sequence[int], draw: random.Random, num_ops: int) -> None:
        extents = self.extents
        high, low = int(extents.num_bytes * self.high), int(extents.num_bytes * self.low)
        next_sample = 0
        while (done := self.num_taken + self.num_dropped) < num_ops:
            size = int(draw.choice(sizes) * draw.choice(KEPT))
            if extents.used_bytes + size > high:
                while self.live and extents.used_bytes + size > low:
                    self.drop(draw)
            while (runs := extents.alloc(size)) is None:
                self.drop(draw)
            self.live.append((runs, size))
            self.payload += size
            self.num_taken += 1
            self.num_runs += len(runs)
            if self.num_dropped and done >= next_sample:
                next_sample = done + OPS_PER_SAMPLE
                lost = extents.used_bytes - self.payload + extents.fragmentation * extents.free_bytes
                self.lost.append(lost / extents.num_bytes)
                self.used.append(self.payload / extents.num_bytes)

    def drop(self, draw: random.Random) -> None:
        position = draw.randrange(len(self.live))
        self.live[position], self.live[-1] = self.live[-1], self.live[position]
        runs, size = self.live.pop()
        self.extents.free(runs)
        self.num_dropped += 1
        self.payload -= size


def node_bytes(trace: Trace) -> list[int]:
    """The exact KV of what each request adds to a tree that never drops anything: new blocks, rest and answer."""
    sizes = []
    tree: dict[tuple[int, int], int] = {}
    for request in trace.requests:
        node, shared = 0, 0
        for depth, block in enumerate(request.blocks, 1):
            child = tree.get((node, block))
            if child is None:
                child = tree[node, block] = len(tree) + 1
            else:
                shared = depth
            node = child
        tokens = request.num_tokens - shared * trace.block_tokens + request.output_tokens
        if tokens > 0:
            sizes.append(tokens * SLOT_BYTES)
    return sizes


def measure(num_ops: int = NUM_OPS) -> Iterator[Line]:
    source = trace_file("mooncake")
    sizes = node_bytes(read_trace(source))
    nodes = f"{len(sizes):,} node sizes of {Path(source).name}, median {statistics.median(sizes) / 1e6:.0f} MB exact"
    for how, high, low in (("always full", 1.0, 1.0), ("kept between 90 % and 95 %", 0.95, 0.90)):
        churn = Churn(Extents(ARENA_BYTES), high, low)
        begin = time.thread_time()
        churn.run(sizes, random.Random(0), num_ops)
        took_us = 1e6 * (time.thread_time() - begin) / num_ops
        worst, mean = max(churn.lost), statistics.fmean(churn.lost)
        yield Line(
            f"host arena of {ARENA_BYTES >> 30} GiB {how}, {num_ops:,} random alloc and free of {nodes}, "
            f"kept to {', '.join(f'{kept:.0%}' for kept in KEPT)}",
            f"fragmentation <= {MOST:.0%} of the arena at any time",
            f"worst {worst:.2%}, mean {mean:.2%}; {statistics.fmean(churn.used):.1%} hold entries; "
            f"{churn.num_runs / churn.num_taken:.2f} runs an entry; {took_us:.1f} us each",
            worst <= MOST,
        )
