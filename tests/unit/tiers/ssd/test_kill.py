"""A process that writes and removes entries is killed at any moment; a new one finds exactly what was published.

``kill_once`` is one such kill; this file run as a program is the process that gets killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from sglang_evicpress.core import EXACT
from sglang_evicpress.tiers.entry.header import BadEntry, Header, Shape, check_identity, extent_of
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.os_files import round_up
from sglang_evicpress.tiers.ssd.store import SsdStore

FINGERPRINT = b"a fingerprint..."
CAPACITY = 24 << 20
SEGMENT_BYTES = 4 << 20
MODES = ("none", "batch", "always")

_PAGE = 4
_SHAPE = Shape(2, 2, 16, "float16", _PAGE)


@dataclass(slots=True)
class Result:
    """Entries before the kill, those reported before it, those found after it, and all that was wrong with that."""

    num_before: int = 0
    num_published: int = 0
    num_removed: int = 0
    num_found: int = 0
    problems: list[str] = field(default_factory=list)


def make_entry(number: int) -> tuple[Header, memoryview]:
    """Entry ``number``: 1 to 600 pages of 4 tokens, 1 KiB a page."""
    draw = random.Random(number)
    num_tokens = _PAGE * (draw.randint(1, 16) if draw.random() < 0.7 else draw.randint(17, 600))
    size = _SHAPE.layer_bytes(num_tokens)
    payload = memoryview(draw.randbytes(2 * size))
    extents = tuple(extent_of(begin, [payload[begin : begin + size]]) for begin in (0, size))
    parent_key, key = (xxhash.xxh3_128_digest(b"%s %d" % (name, number)) for name in (b"parent", b"end"))
    tokens = np.array([number % 2**32] * num_tokens, dtype="<u4").tobytes()
    return (
        Header(FINGERPRINT, bytes(16), parent_key, key, 0, tokens, EXACT, False, num_tokens, _SHAPE, extents),
        payload,
    )


def kill_once(folder: Path, seed: int) -> Result:
    """Start the writing process, kill it at a random moment, open the store again and compare."""
    draw = random.Random(seed)
    with closing(_open(folder)) as store:
        before = {_number_of(store, ref) for ref in store.entries_behind(None, 1 << 30)}
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(seed), MODES[seed % len(MODES)]], stdout=subprocess.PIPE
    )
    lines: list[bytes] = []
    try:
        if draw.random() < 0.1:
            time.sleep(draw.uniform(0.0, 0.5))  # while it starts
        else:
            lines += [process.stdout.readline() for _ in range(draw.randint(1, 300))]
        time.sleep(draw.uniform(0.0, 0.002))  # not in step with what it reports
    finally:
        process.kill()
        lines += process.stdout.read().splitlines(keepends=True)
        process.stdout.close()
        code = process.wait()
    reports = [line.decode().split() for line in lines if line.endswith(b"\n")]
    result = _compare(folder, before, reports)
    if code != -signal.SIGKILL:
        result.problems.append(f"the process ended by itself, with code {code}")
    return result


def _open(folder: Path, sync: str = "none") -> SsdStore:
    return SsdStore(folder, CAPACITY, FINGERPRINT, sync=sync, segment_bytes=SEGMENT_BYTES)


def _number_of(store: SsdStore, ref: Ref) -> int:
    return int(np.frombuffer(store.read_header(ref).tokens[:4], dtype="<u4")[0])


def _compare(folder: Path, before: set[int], reports: list[list[str]]) -> Result:
    writing, published, removing, removed = (
        {int(number) for verb, number in reports if verb == wanted}
        for wanted in ("writing", "published", "removing", "removed")
    )
    started = before | writing
    result = Result(len(before), len(published), len(removed))
    problems = result.problems
    with closing(_open(folder)) as store:
        if not store.errors.keys() <= {"length"} or store.errors["length"] > 1:  # the record that the kill cut short
            problems.append(f"errors at the start: {dict(store.errors)}")
        payloads, found = 0, set()
        for number in started:
            header, payload = make_entry(number)
            refs = store.find(header.lookup_key)
            if refs:
                found.add(number)
                payloads += sum(round_up(ref.num_bytes) for ref in refs)
            if len(refs) > 1:
                problems.append(f"entry {number} is there {len(refs)} times")
            problems += [
                f"entry {number}: {problem}" for ref in refs if (problem := _problem(store, ref, header, payload))
            ]
        result.num_found = len(found)
        if lost := (before | published) - removing - found:
            problems.append(f"published and gone: {sorted(lost)}")
        if back := removed & found:
            problems.append(f"removed and back: {sorted(back)}")
        if store.num_entries != len(found):
            problems.append(f"{store.num_entries} entries in the index, {len(found)} of them were started")
        problems += _space_problems(store, folder, payloads)
    return result


def _problem(store: SsdStore, ref: Ref, header: Header, payload: memoryview) -> str | None:
    """Why the entry is not what was written, or None."""
    data = memoryview(bytearray(len(payload)))
    try:
        read = store.read_header(ref)
        check_identity(
            read,
            fingerprint=FINGERPRINT,
            namespace=header.namespace,
            parent_key=header.parent_key,
            key=header.key,
        )
        store.read(ref, read, [data])
    except (BadEntry, ValueError) as error:
        return str(error)
    if (read.tokens, read.extents) != (header.tokens, header.extents):
        return "its header is another one"
    return None if data == payload else "its payload is another one"


def _space_problems(store: SsdStore, folder: Path, payloads: int) -> list[str]:
    store.reclaim()
    heads = sum(round_up(path.stat().st_size) for path in folder.glob("*.head"))
    files = list(folder.glob("segment-*"))
    disk = sum(path.stat().st_blocks * 512 for path in files)
    found = []
    if store.used_bytes != payloads + heads:
        found.append(f"{store.used_bytes} bytes used: expected {payloads} of payloads and {heads} of records")
    if not store.used_bytes <= disk <= store.used_bytes + 8192 * len(files):  # for the file system's own lists
        found.append(f"{store.used_bytes} bytes used: the disk says {disk}")
    return found


def _write_forever(folder: Path, seed: int, sync: str) -> None:
    """Report each step before and after it is taken; entry numbers are the process's own."""
    draw = random.Random(seed)
    store = _open(folder, sync)
    refs = [(_number_of(store, ref), ref) for ref in store.entries_behind(None, 1 << 30)]

    def report(verb: str, number: int) -> None:
        os.write(1, b"%s %d\n" % (verb.encode(), number))

    number = seed % 4000 * 1_000_000
    while True:
        number += 1
        header, payload = make_entry(number)
        reservation = store.reserve(header.payload_bytes)
        if reservation is not None and draw.random() < 0.05:
            store.release(reservation)
        elif reservation is not None:
            report("writing", number)
            refs.append((number, store.write(reservation, header, [payload])))
            report("published", number)
        for _ in range(20 if reservation is None else draw.randrange(3)):
            if refs and (reservation is None or draw.random() < 0.4):
                old, ref = refs.pop(draw.randrange(len(refs)))
                report("removing", old)
                store.remove(ref)
                report("removed", old)
        if reservation is None or draw.random() < 0.1:
            store.reclaim()


def test_kill_loses_nothing_that_was_published_and_brings_nothing_back(tmp_path: Path) -> None:
    results = [kill_once(tmp_path / "rank-0", seed) for seed in range(12)]
    assert [result.problems for result in results] == [[]] * 12
    assert sum(result.num_published for result in results) > 12  # how many depends on the load
    assert sum(result.num_removed for result in results) > 2


if __name__ == "__main__":
    _write_forever(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
