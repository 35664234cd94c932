"""Bandwidth of the SSD tier beside the same bytes through plain sequential IO in the same folder, and what a tiny entry
costs beyond the IO of its bytes.

Rounds are paired: in each one ours and the other follow one another on the same disk, now one first and now the other,
and the ratio is taken within the round. The median of the ratios is what counts.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from evicbench.report import Line
from evicbench.tiers.inputs import FINGERPRINT, SHAPE_8B, checksums, make_header, put, scratch, take, timed
from evicbench.tiers.peer import measure_peer
from sglang_evicpress.tiers.entry.header import Shape
from sglang_evicpress.tiers.host.arena import Arena
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.store import SsdStore

NUM_TOKENS = 768
NUM_BYTES = SHAPE_8B.num_layers * SHAPE_8B.layer_bytes(NUM_TOKENS)  # 96 MiB
NUM_ROUNDS = 24
SHARE = 0.85
DISK_BYTES = 4 << 30
BLOCK_BYTES = 16 << 20

TINY = Shape(32, 1, 64, "bfloat16", 1)
TINY_TOKENS = 2
TINY_BYTES = TINY.num_layers * TINY.layer_bytes(TINY_TOKENS)  # 16 KB
NUM_ENTRIES = 500
OVERHEAD_US = 200.0


def measure(num_rounds: int = NUM_ROUNDS, *, with_others: bool = True) -> Iterator[Line]:
    with scratch(DISK_BYTES) as folder:
        arena = Arena(2 * NUM_BYTES)
        arena.data.copy_(torch.randint(0, 256, (arena.num_bytes,), dtype=torch.uint8))
        store = SsdStore(folder / "ours", DISK_BYTES // 2, FINGERPRINT)
        try:
            yield from measure_sequential(store, arena, folder, num_rounds)
            if with_others:
                yield measure_overhead(store, arena, folder)
                yield from measure_peer(store, arena, folder)
        finally:
            store.close()
            arena.close()


def measure_sequential(store: SsdStore, arena: Arena, folder: Path, num_rounds: int) -> Iterator[Line]:
    """One entry of 96 MiB after the other, written and read back; the same bytes through a loop and dd.

    In a stream of demotions one worker computes an entry's checksums, as it copies it, while another writes the entry
    before; so does ``write``.
    """
    source, target = take(arena.extents, NUM_BYTES), take(arena.extents, NUM_BYTES)
    (memory,), (memory_read,) = arena.buffers(source, 0, NUM_BYTES), arena.buffers(target, 0, NUM_BYTES)
    hashed = partial(checksums, arena, source, SHAPE_8B, NUM_TOKENS)
    draw, extents, refs = random.Random(0), hashed(), list[Ref]()
    writes, reads = dict[str, list[float]](), dict[str, list[float]]()
    path = folder / "plain"
    with ThreadPoolExecutor(1) as worker:

        def write() -> None:
            following = worker.submit(hashed)
            refs.append(put(store, make_header(draw, SHAPE_8B, NUM_TOKENS, extents), [memory]))
            following.result()

        def read() -> None:
            store.read(refs[0], store.read_header(refs[0]), [memory_read])

        for number in range(-2, num_rounds):
            if number == 0:  # the rounds before warm up
                writes, reads = {}, {}
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                timed(writes, {"ours": write, "loop": partial(_write_blocks, file, memory)}, number)
                store.sync()  # between the rounds, so that no write-back runs under the next
                os.fdatasync(file)
                check = partial(_check_and_clear, memory, memory_read)
                timed(reads, {"ours": read, "loop": partial(_read_blocks, file, memory_read)}, number, check)
            finally:
                os.close(file)
            if shutil.which("dd") is not None:
                writes.setdefault("dd", []).append(_dd_s("if=/dev/zero", f"of={path}", "oflag=direct"))
                reads.setdefault("dd", []).append(_dd_s(f"if={path}", "of=/dev/null", "iflag=direct"))
            path.unlink()
            store.remove(refs.pop())
            store.reclaim()
    arena.extents.free(source)
    arena.extents.free(target)
    entry = f"entry of {NUM_BYTES / 1e6:.0f} MB in {SHAPE_8B.num_layers} layers"
    yield _line(f"SSD write with checksums and header, {entry}", writes)
    yield _line(f"SSD read with every checksum verified, {entry}", reads)


def _line(what: str, seconds: Mapping[str, Sequence[float]]) -> Line:
    share = statistics.median(loop / own for own, loop in zip(seconds["ours"], seconds["loop"], strict=True))
    rates = (
        f"{name} {NUM_BYTES / statistics.median(took) / 1e9:.2f} GB/s (best {NUM_BYTES / min(took) / 1e9:.2f})"
        for name, took in seconds.items()
    )
    figure = f"{share:.0%}, the median of {len(seconds['ours'])} paired rounds: {', '.join(rates)}"
    return Line(what, f">= {SHARE:.0%} of a sequential O_DIRECT loop", figure, share >= SHARE)


def _write_blocks(file: int, memory: memoryview) -> None:
    for begin in range(0, len(memory), BLOCK_BYTES):
        block = memory[begin : begin + BLOCK_BYTES]
        if os.pwrite(file, block, begin) != len(block):
            raise OSError("a plain write was cut short")


def _read_blocks(file: int, memory: memoryview) -> None:
    for begin in range(0, len(memory), BLOCK_BYTES):
        block = memory[begin : begin + BLOCK_BYTES]
        if os.preadv(file, [block], begin) != len(block):
            raise OSError("a plain read was cut short")


def _dd_s(*words: str) -> float:
    """The seconds that dd says."""
    command = ["dd", *words, f"bs={BLOCK_BYTES}", f"count={NUM_BYTES // BLOCK_BYTES}"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    found = re.search(r"copied, ([0-9.e-]+) s", run.stderr)
    if found is None:
        raise RuntimeError(f"dd said {run.stderr.strip()!r}: expected its seconds")
    return float(found.group(1))


def _check_and_clear(expected: memoryview, found: memoryview) -> None:
    """A byte in every 4096: the pieces of either reader are larger."""
    if found[::4096] != expected[::4096]:
        raise RuntimeError("what was read is not what was written")
    found[::4096] = bytes(len(found) // 4096)


def measure_overhead(store: SsdStore, arena: Arena, folder: Path) -> Line:
    """Entries of 16 KB, each beside a plain write or read of as much past the page cache."""
    runs, draw = take(arena.extents, TINY_BYTES), random.Random(1)
    pieces = arena.buffers(runs, 0, TINY_BYTES)
    headers, refs, seconds = [], list[Ref](), dict[str, list[float]]()
    file = os.open(folder / "plain-tiny", os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def read(lookup_key: int) -> None:
        ref = store.find(lookup_key)[0]
        store.read(ref, store.read_header(ref), pieces)

    try:
        for number in range(NUM_ENTRIES):
            header = make_header(draw, TINY, TINY_TOKENS, checksums(arena, runs, TINY, TINY_TOKENS))
            headers.append(header)
            raw = partial(os.pwritev, file, pieces, number * TINY_BYTES)
            timed(seconds, {"raw write": raw, "write": lambda header=header: refs.append(put(store, header, pieces))})
        store.sync()
        order = draw.sample(range(NUM_ENTRIES), NUM_ENTRIES)
        for number in order:
            key = headers[number].lookup_key
            raw = partial(os.preadv, file, pieces, number * TINY_BYTES)
            timed(seconds, {"raw read": raw, "find": partial(store.find, key), "read": partial(read, key)})
        for number in order:
            timed(seconds, {"remove": partial(store.remove, refs[number])})
    finally:
        os.close(file)
        arena.extents.free(runs)
    store.reclaim()
    us = {name: 1e6 * statistics.median(values) for name, values in seconds.items()}
    write, read_us = us["write"] - us["raw write"], us["read"] - us["raw read"]
    return Line(
        f"overhead per entry of {TINY_BYTES // 1024} KB in {TINY.num_layers} layers beyond the IO of its bytes, "
        f"medians of {NUM_ENTRIES}",
        f"< {OVERHEAD_US:.0f} us each to write, read (find, header, checksums) and remove",
        f"write {write:.0f} us (raw {us['raw write']:.0f}), read {read_us:.0f} us (raw {us['raw read']:.0f}; find "
        f"alone {us['find']:.1f}), remove {us['remove']:.0f} us",
        max(write, read_us, us["remove"]) < OVERHEAD_US,
    )
