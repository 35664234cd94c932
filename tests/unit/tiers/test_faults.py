"""Faults on purpose: they do what they say, and the store under them serves nothing that is wrong."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.unit.tiers.ssd.test_ssd import oldest

from sglang_evicpress.core import EXACT
from sglang_evicpress.tiers.entry.header import BadEntry, Header, Shape, extent_of
from sglang_evicpress.tiers.faults import KINDS, Faults, FaultyFiles
from sglang_evicpress.tiers.ssd.store import SsdStore

MiB = 1 << 20


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seed=7",
        "seed=7,delay=0.02:0.05,eio=0.01,enospc=0.01,short=0.01,flip=0.01,lost=0.005",
        " eio=1 , ",
        "read=5e6",
    ],
)
def test_texts_that_are_accepted(text: str) -> None:
    faults = Faults.parse(text)
    assert set(faults.rates) <= set(KINDS)
    if "delay" in text:
        assert (faults.seed, faults.delay_s, faults.rates["lost"]) == (7, 0.05, 0.005)


@pytest.mark.parametrize(
    "text",
    ["eio", "eio=", "eio=2", "eio=-0.1", "eio=nan", "eio=0.1:3", "fire=0.1", "seed=x", "seed", "delay=0.1:x"]
    + ["read=0", "read=-1", "read=inf", "read=nan", "read=1:2", "read"],
)
def test_texts_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=RATE with NAME one of delay, eio") as caught:
        Faults.parse(f"eio=0.5,{text}")
    assert repr(text) in str(caught.value)


def test_same_seed_makes_the_same_faults() -> None:
    def draw(text: str) -> list[bool]:
        faults = Faults.parse(text)
        return [faults.happens(kind) for _ in range(200) for kind in ("eio", "flip")]

    assert draw("seed=1,eio=0.5,flip=0.1") == draw("seed=1,eio=0.5,flip=0.1")
    assert draw("seed=1,eio=0.5,flip=0.1") != draw("seed=2,eio=0.5,flip=0.1")


def test_faults_are_as_often_as_wanted_and_counted() -> None:
    faults = Faults.parse("eio=0.2")
    happened = sum(faults.happens("eio") for _ in range(5000))
    assert 800 < happened < 1200
    assert not any(faults.happens("flip") for _ in range(100))
    assert faults.counts == {"eio": happened}
    faults.is_on = False
    assert not any(faults.happens("eio") for _ in range(100))


def test_reads_of_a_slow_disk_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("sglang_evicpress.tiers.faults.time.sleep", slept.append)
    monkeypatch.setattr("sglang_evicpress.tiers.faults.time.monotonic", lambda: 100.0)
    faults = Faults.parse("read=1000")
    faults.pace(500)
    faults.pace(2000)
    Faults().pace(1 << 40)
    assert slept == pytest.approx([0.5, 2.5])


def test_flip_changes_one_bit() -> None:
    faults = Faults.parse("flip=1")
    data = bytearray(100)
    assert faults.maybe_flip(memoryview(data))
    assert sum(byte.bit_count() for byte in data) == 1
    assert not faults.maybe_flip(memoryview(bytearray()))
    assert not Faults().maybe_flip(memoryview(data))


def test_memory_of_the_host_is_flipped_at_a_rate_of_its_own_or_at_that_of_the_disk() -> None:
    data = memoryview(bytearray(100))
    assert Faults.parse("flip=1").maybe_flip_host(data)
    assert not Faults.parse("flip=1,host_flip=0").maybe_flip_host(data)
    more_often = Faults.parse("host_flip=1")
    assert more_often.maybe_flip_host(data) and not more_often.maybe_flip(data)
    assert more_often.counts == {"host_flip": 1}


def test_each_fault_of_files(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    data = memoryview(bytearray(os.urandom(40_000)))

    def files(text: str) -> FaultyFiles:
        return FaultyFiles(Faults.parse(text))

    fd = files("").open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert files("").pwritev(fd, [data], 0) == 40_000
        for call in (
            lambda faulty: faulty.preadv(fd, [memoryview(bytearray(10))], 0),
            lambda faulty: faulty.pwritev(fd, [data], 0),
            lambda faulty: faulty.append(fd, b"1"),
            lambda faulty: faulty.fdatasync(fd),
            lambda faulty: faulty.truncate(fd, 0),
            lambda faulty: faulty.punch_hole(fd, 0, 4096),
            lambda faulty: faulty.unlink(path),
        ):
            with pytest.raises(OSError) as caught:
                call(files("eio=1"))
            assert caught.value.errno == errno.EIO
        with pytest.raises(OSError) as caught:
            files("enospc=1").pwritev(fd, [data], 0)
        assert caught.value.errno == errno.ENOSPC
        assert files("").size(fd) == 40_000

        found = memoryview(bytearray(40_000))
        halves = [found[:20_000], found[20_000:]]
        done = files("short=1").preadv(fd, halves, 0)
        assert done < 40_000 and found[:done] == data[:done] and found[done:] == b"\xa5" * (40_000 - done)
        assert files("flip=1").preadv(fd, halves, 0) == 40_000
        assert sum((left ^ right).bit_count() for left, right in zip(found, data, strict=True)) == 1
        assert files("short=1,seed=3").pwritev(fd, [data], 0) % 4096 == 0
        assert files("").preadv(fd, halves, 0) == 40_000 and found == data
    finally:
        os.close(fd)
    lost = files("lost=1")
    with pytest.raises(FileNotFoundError):
        lost.open(path, os.O_RDONLY)
    assert not Path(path).exists() and lost.faults.counts == {"lost": 1}
    os.close(lost.open(path, os.O_RDWR | os.O_CREAT))


def make_entry(number: int) -> tuple[Header, memoryview]:
    draw = np.random.default_rng(number)
    num_tokens = 4 * (1 + number * 7919 % 300)
    shape = Shape(2, 2, 8, "float16", 4)
    size = shape.layer_bytes(num_tokens)
    payload = memoryview(draw.bytes(2 * size))
    extents = tuple(extent_of(begin, [payload[begin : begin + size]]) for begin in (0, size))
    tokens = np.full(num_tokens, number, dtype="<u4").tobytes()
    keys = b"%16d" % number, b"%15d." % number
    return Header(bytes(16), bytes(16), *keys, 0, tokens, EXACT, False, num_tokens, shape, extents), payload


@pytest.mark.parametrize(
    "text",
    [
        "delay=0.01:0.001,eio=0.02,enospc=0.02,short=0.02,flip=0.02,lost=0.01",
        "flip=0.2",
        "eio=0.2",
        "enospc=0.3",
        "short=0.3",
        "lost=0.1",
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_store_on_a_bad_disk_serves_nothing_that_is_wrong(tmp_path: Path, text: str, seed: int) -> None:
    faults = Faults.parse(f"{text},seed={seed}")
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(4):
        faults.is_on = True
        store = SsdStore(
            tmp_path, 8 * MiB, bytes(16), sync="none", segment_bytes=1, backoff_s=0.0, files=FaultyFiles(faults)
        )
        for _ in range(100):
            number = draw.randrange(60)
            header, payload = make_entry(number)
            refs = store.find(header.lookup_key)
            if refs and draw.random() < 0.2:
                store.remove(draw.choice(refs))
            elif refs:
                data = bytearray(len(payload))
                try:
                    read = store.read_header(refs[0])
                    assert read.tokens == header.tokens
                    store.read(refs[0], read, [memoryview(data)])
                except BadEntry as error:
                    outcomes[error.reason] += 1
                    assert refs[0] not in store
                else:
                    outcomes["served"] += 1
                    assert data == payload
            elif (reservation := store.reserve(len(payload))) is not None:
                try:
                    store.write(reservation, header, [payload])
                except OSError:
                    outcomes["not written"] += 1
            else:
                outcomes["no room"] += 1
                for ref in oldest(store, 2 * MiB):
                    store.remove(ref)
            if draw.random() < 0.1:
                store.reclaim()
            assert store.used_bytes >= 0
        faults.is_on = False
        store.reclaim()
        files = [path.stat() for path in tmp_path.glob("segment-*")]
        allocated = sum(file.st_blocks * 512 for file in files)
        slack = 8192 * len(files) + 4096  # for the file system's own lists
        assert store.used_bytes >= allocated - slack
        if not faults.counts["lost"] and not faults.counts["flip"]:  # a flipped tombstone lets a hole count as live
            assert store.used_bytes <= allocated + slack
        store.close()
    assert outcomes["served"] > 20 and faults.counts.total() > 10
    store = SsdStore(tmp_path, 8 * MiB, bytes(16), sync="none")
    for number in range(60):
        header, payload = make_entry(number)
        for ref in store.find(header.lookup_key):
            data = bytearray(len(payload))
            try:
                store.read(ref, store.read_header(ref), [memoryview(data)])
            except BadEntry:
                continue
            assert data == payload
    store.close()
