"""A million entries on SSD: how long the start-up scan takes, how much memory the index needs, how fast it finds.

The headers are real ones, written by `entry.encode`; the payloads are holes in files of the right size. Each scan runs
in a process of its own, so that memory is counted from a clean start.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import psutil

from evicbench.report import Line
from evicbench.tiers.inputs import FINGERPRINT, forget, make_header, scratch
from sglang_evicpress.tiers.entry.encoding import encode
from sglang_evicpress.tiers.entry.header import Extent, Shape
from sglang_evicpress.tiers.ssd.store import SsdStore

NUM_ENTRIES = 1_000_000
SEGMENT_BYTES = 256 << 20  # as a store makes them
BLOCK_BYTES = 4096  # a payload begins on a multiple of it
SHAPE = Shape(32, 2, 64, "bfloat16", 1)
TOKENS = (60, 80, 100, 120, 140)
"""Of an entry; 1.6 MB in the mean, so that a million are 1.6 TB of holes."""

SAMPLE = 50
"""One in so many is looked up afterwards."""

PER_SECOND = 100_000.0
ENTRY_BYTES = 200.0
DISK_BYTES = 4 << 30
CAPACITY_BYTES = 8 << 40


def write_heads(folder: Path, num_entries: int) -> int:
    """Segments as a store leaves them, and a file of what one in SAMPLE is found by; bytes of all headers."""
    draw = random.Random(3)
    extents = {}
    for tokens in TOKENS:
        size = SHAPE.layer_bytes(tokens)
        extents[tokens] = tuple(Extent(layer * size, size, draw.randbytes(16)) for layer in range(SHAPE.num_layers))
    (folder / "store").mkdir()
    sample, records = array("q"), bytearray()
    segment, offset, num_bytes = 1, 0, 0
    for number in range(num_entries):
        tokens = draw.choice(TOKENS)
        payload = extents[tokens][-1].offset + extents[tokens][-1].num_bytes
        if offset + payload > SEGMENT_BYTES:
            num_bytes += _write_segment(folder / "store", segment, records, offset)
            segment, offset, records = segment + 1, 0, bytearray()
        header = make_header(draw, SHAPE, tokens, extents[tokens], offset)
        records += encode(header)
        offset += -(-payload // BLOCK_BYTES) * BLOCK_BYTES
        if number % SAMPLE == 0:
            sample.append(header.lookup_key)
    num_bytes += _write_segment(folder / "store", segment, records, offset)
    (folder / "lookup_keys").write_bytes(sample.tobytes())
    return num_bytes


def _write_segment(folder: Path, number: int, records: bytearray, num_bytes: int) -> int:
    (folder / f"segment-{number:06}.head").write_bytes(records)
    with (folder / f"segment-{number:06}.kv").open("wb") as file:
        file.truncate(num_bytes)
    return len(records)


def scan(folder: Path) -> dict[str, float]:
    """Open the store here and look entries up. ``rss_bytes``: resident after the scan less before it."""
    lookup_keys = array("q", (folder / "lookup_keys").read_bytes())
    order = random.Random(4).sample(range(len(lookup_keys)), len(lookup_keys))
    gc.collect()
    before = psutil.Process().memory_info().rss
    begin, begin_cpu = time.perf_counter(), time.process_time()
    store = SsdStore(folder / "store", CAPACITY_BYTES, FINGERPRINT)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    gc.collect()
    rss_bytes = psutil.Process().memory_info().rss - before
    begin = time.perf_counter()
    num_found = sum(len(store.find(lookup_keys[index])) == 1 for index in order)
    middle = time.perf_counter()
    num_wrong = sum(len(store.find(lookup_keys[index] ^ 1 << 40)) for index in order)
    absent_s = time.perf_counter() - middle
    looked_up = [lookup_keys[index] for index in order[:200]]
    num_right = sum(store.read_header(store.find(each)[0]).lookup_key == each for each in looked_up)
    figures = {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "num_entries": store.num_entries,
        "rss_bytes": rss_bytes,
        "find_us": 1e6 * (middle - begin) / len(order),
        "absent_us": 1e6 * absent_s / len(order),
        "is_right": num_found == len(order) and num_right == 200 and not num_wrong and not store.errors,
    }
    store.close()
    return figures


def measure(num_entries: int = NUM_ENTRIES) -> Iterator[Line]:
    with scratch(DISK_BYTES) as folder:
        num_bytes = write_heads(folder, num_entries)
        os.sync()
        forget(folder / "store")
        results = []
        for _ in ("cold", "warm"):
            command = [sys.executable, "-m", "evicbench.tiers.index", str(folder)]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            if run.returncode:
                raise RuntimeError(f"the scan failed: {run.stderr.strip().splitlines()[-1]}")
            results.append(json.loads(run.stdout))
    cold, warm = results
    is_right = all(found["num_entries"] == num_entries and found["is_right"] for found in results)
    size = f"{num_bytes / num_entries:.0f} bytes a header"
    verdict = "all found, none that is not there" if is_right else "WRONG ENTRIES"
    yield Line(
        f"start-up scan of {num_entries:,} SSD entries, {size}, cold page cache",
        f">= {PER_SECOND:,.0f} headers/s",
        f"{num_entries / cold['seconds']:,.0f} headers/s: {cold['seconds']:.1f} s, {cold['cpu_s']:.1f} s of CPU; "
        f"with a warm page cache {num_entries / warm['seconds']:,.0f}, {warm['seconds']:.1f} s; {verdict}",
        is_right and num_entries / cold["seconds"] >= PER_SECOND,
    )
    per_entry = max(cold["rss_bytes"], warm["rss_bytes"]) / num_entries
    yield Line(
        f"memory of the index of {num_entries:,} SSD entries",
        f"<= {ENTRY_BYTES:.0f} bytes an entry",
        f"{per_entry:.0f} bytes of resident memory (RSS after the scan less before); lookup {warm['find_us']:.2f} us, "
        f"of an edge that is not there {warm['absent_us']:.2f} us",
        is_right and per_entry <= ENTRY_BYTES,
    )


if __name__ == "__main__":
    print(json.dumps(scan(Path(sys.argv[1]))))
