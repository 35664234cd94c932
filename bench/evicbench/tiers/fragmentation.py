"""Fragmentation of the host arena after a million allocations and frees of a real trace's nodes."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evicbench.policy.runs import SLOT_BYTES, trace_file
from evicbench.report import Line
from sglang_evicpress.quantiles import quantile
from sglang_evicpress.tiers.host.arena import Extents, Run
from sglang_evicpress.traces import Trace, read_trace

ARENA_BYTES = 256 << 30
NUM_OPS = 1_000_000
KEPT = (1.0, 0.8, 0.5, 0.2)
OPS_PER_SAMPLE = 1_000
MOST = 0.10


@dataclass(slots=True)
class Churn:
    """Entries of random nodes come; random ones go when more than ``high`` of the arena is used, until ``low`` is.

    At 1.0 each, entries go only when the next one does not fit: the arena is always full.
    """

    extents: Extents
    high: float
    low: float
    live: list[tuple[Sequence[Run], int]] = field(default_factory=list)
    payload: int = 0
    num_runs: int = 0
    num_taken: int = 0
    taken_s: array[float] = field(default_factory=lambda: array("d"))
    freed_s: array[float] = field(default_factory=lambda: array("d"))
    lost: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def run(self, sizes: Sequence[int], draw: random.Random, num_ops: int) -> None:
        extents, taken_s, freed_s = self.extents, self.taken_s, self.freed_s
        high, low = int(extents.num_bytes * self.high), int(extents.num_bytes * self.low)
        next_sample = 0
        while (done := len(taken_s) + len(freed_s)) < num_ops:
            size = int(draw.choice(sizes) * draw.choice(KEPT))
            if extents.used_bytes + size > high:
                while self.live and extents.used_bytes + size > low:
                    self.drop(draw)
            while (runs := self.take(size)) is None:
                self.drop(draw)
            self.live.append((runs, size))
            self.payload += size
            self.num_taken += 1
            self.num_runs += len(runs)
            if freed_s and done >= next_sample:
                next_sample = done + OPS_PER_SAMPLE
                self.sample()

    def take(self, size: int) -> Sequence[Run] | None:
        begin = time.perf_counter()
        runs = self.extents.alloc(size)
        self.taken_s.append(time.perf_counter() - begin)
        return runs

    def drop(self, draw: random.Random) -> None:
        position = draw.randrange(len(self.live))
        self.live[position], self.live[-1] = self.live[-1], self.live[position]
        runs, size = self.live.pop()
        begin = time.perf_counter()
        self.extents.free(runs)
        self.freed_s.append(time.perf_counter() - begin)
        self.payload -= size

    def sample(self) -> None:
        """Lost: what rounding adds to the entries, and the free bytes that one allocation could not get."""
        extents = self.extents
        lost = extents.used_bytes - self.payload + extents.fragmentation * extents.free_bytes
        self.lost.append(lost / extents.num_bytes)
        self.used.append(self.payload / extents.num_bytes)


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


def measure_fragmentation(num_ops: int = NUM_OPS) -> Iterator[Line]:
    source = trace_file("mooncake")
    sizes = node_bytes(read_trace(source))
    nodes = f"{len(sizes):,} node sizes of {Path(source).name}, median {statistics.median(sizes) / 1e6:.0f} MB exact"
    for how, high, low in (("always full", 1.0, 1.0), ("kept between 90 % and 95 %", 0.95, 0.90)):
        churn = Churn(Extents(ARENA_BYTES), high, low)
        churn.run(sizes, random.Random(0), num_ops)
        worst, mean = max(churn.lost), statistics.fmean(churn.lost)
        yield Line(
            f"host arena of {ARENA_BYTES >> 30} GiB {how}, {num_ops:,} random alloc and free of {nodes}, "
            f"kept to {', '.join(f'{kept:.0%}' for kept in KEPT)}",
            f"fragmentation <= {MOST:.0%} of the arena at any time",
            f"worst {worst:.2%}, mean {mean:.2%}; {statistics.fmean(churn.used):.1%} hold entries; "
            f"{churn.num_runs / churn.num_taken:.2f} runs an entry; "
            f"alloc {_micros(churn.taken_s)}, free {_micros(churn.freed_s)}",
            worst <= MOST,
        )


def _micros(seconds: Sequence[float]) -> str:
    return f"{quantile(seconds, 0.5) * 1e6:.1f} us (p99 {quantile(seconds, 0.99) * 1e6:.0f})"
