"""Overhead of a tiny entry beyond the IO of its bytes, where an SSD tier spends its time when nodes are small."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from evicbench.report import Line
from evicbench.tiers.inputs import checksums, make_header
from sglang_evicpress.tiers.entry.encoding import Shape
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.ssd.store import SsdStore

SHAPE = Shape(32, 1, 64, "bfloat16", 1)
NUM_TOKENS = 2
NUM_BYTES = SHAPE.num_layers * SHAPE.layer_bytes(NUM_TOKENS)  # 16 KB
NUM_ENTRIES = 500
OVERHEAD_US = 200.0


def measure_overhead(store: SsdStore, arena: Arena, folder: Path) -> Iterator[Line]:
    """Entries of 16 KB, each beside a plain write or read of as much past the page cache."""
    runs = arena.extents.alloc(NUM_BYTES)
    if runs is None:
        raise RuntimeError("the arena is too small")
    draw = random.Random(1)
    pieces = arena.buffers(runs, 0, NUM_BYTES)
    refs, lookup_keys = [], []
    clock = time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ("write", "raw write", "find", "read", "raw read", "remove")}
    file = os.open(folder / "plain-tiny", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        for number in range(NUM_ENTRIES):
            begin = clock()
            os.pwritev(file, pieces, number * NUM_BYTES)
            middle = clock()
            header = make_header(draw, SHAPE, NUM_TOKENS, checksums(arena, runs, SHAPE, NUM_TOKENS))
            made = clock()
            reservation = store.reserve(NUM_BYTES)
            if reservation is None:
                raise RuntimeError("the store has no room")
            refs.append(store.write(reservation, header, pieces))
            times["raw write"].append(middle - begin)
            times["write"].append(clock() - made)
            lookup_keys.append(header.lookup_key)
        store.sync()
        order = list(range(NUM_ENTRIES))
        draw.shuffle(order)
        for number in order:
            begin = clock()
            os.preadv(file, pieces, number * NUM_BYTES)
            middle = clock()
            found = store.find(lookup_keys[number])
            looked_up = clock()
            header = store.read_header(found[0])
            store.read(found[0], header, pieces)
            times["raw read"].append(middle - begin)
            times["find"].append(looked_up - middle)
            times["read"].append(clock() - middle)
        for number in order:
            begin = clock()
            store.remove(refs[number])
            times["remove"].append(clock() - begin)
    finally:
        os.close(file)
        arena.extents.free(runs)
    store.reclaim()
    us = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    write, read = us["write"] - us["raw write"], us["read"] - us["raw read"]
    yield Line(
        f"overhead per entry of {NUM_BYTES // 1024} KB in {SHAPE.num_layers} layers beyond the IO of its bytes, "
        f"medians of {NUM_ENTRIES}",
        f"< {OVERHEAD_US:.0f} us each to write, read (find, header, checksums) and remove",
        f"write {write:.0f} us (raw {us['raw write']:.0f}), read {read:.0f} us (raw {us['raw read']:.0f}; find alone "
        f"{us['find']:.1f}), remove {us['remove']:.0f} us",
        max(write, read, us["remove"]) < OVERHEAD_US,
    )
