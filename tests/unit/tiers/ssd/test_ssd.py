"""The SSD store on a real folder: what is published is found, bit for bit, and nothing else is."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_evicpress.core import EXACT
from sglang_evicpress.tiers.entry.header import BadEntry, Header, Shape, extent_of
from sglang_evicpress.tiers.ssd import segments
from sglang_evicpress.tiers.ssd.folder import StoreError
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES, Files
from sglang_evicpress.tiers.ssd.store import SsdStore

FINGERPRINT = bytes(range(16))
CAPACITY = 1 << 30
PAGE = 4
MiB = 1 << 20


def make_entry(seed: int, num_pages: int = 3, fingerprint: bytes = FINGERPRINT) -> tuple[Header, memoryview]:
    """Three layers of 16 bytes per token and side: 384 bytes a page. The seed alone makes the lookup key."""
    draw = np.random.default_rng(seed)
    num_tokens = PAGE * num_pages
    shape = Shape(3, 2, 4, "float16", PAGE)
    size = shape.layer_bytes(num_tokens)
    keys = draw.bytes(16), draw.bytes(16)
    tokens = draw.integers(0, 30_000, num_tokens, dtype=np.uint32).tobytes()
    payload = memoryview(draw.bytes(3 * size))
    extents = tuple(extent_of(begin, [payload[begin : begin + size]]) for begin in range(0, 3 * size, size))
    return Header(fingerprint, bytes(16), *keys, 0, tokens, EXACT, False, num_tokens, shape, extents), payload


def put(store: SsdStore, header: Header, payload: memoryview) -> Ref:
    reservation = store.reserve(header.payload_bytes)
    return store.write(reservation, header, [payload])


def fetch(store: SsdStore, ref: Ref) -> bytes:
    header = store.read_header(ref)
    data = bytearray(header.payload_bytes)
    store.read(ref, header, [memoryview(data)])
    return bytes(data)


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("segment-*"))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., SsdStore]]:
    """Opens the store in the test's folder, again and again; the last one is closed by itself."""
    opened: list[SsdStore] = []

    def open_one(capacity: int = CAPACITY, fingerprint: bytes = FINGERPRINT, **options: object) -> SsdStore:
        if opened:
            opened.pop().close()
        opened.append(SsdStore(tmp_path / "rank-0", capacity, fingerprint, sync="none", **options))
        return opened[0]

    yield open_one
    if opened:
        opened.pop().close()


@pytest.fixture
def store(open_store: Callable[..., SsdStore]) -> SsdStore:
    return open_store()


def oldest(store: SsdStore, num_bytes: int, used: Sequence[Ref] = ()) -> list[Ref]:
    """Entries that are not ``used``, oldest first, until they have that many bytes."""
    refs: list[Ref] = []
    for ref in store.entries_behind(None, 1 << 30):
        if num_bytes > 0 and ref not in used:
            refs.append(ref)
            num_bytes -= ref.num_bytes
    return refs


def pages_of(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


@pytest.mark.parametrize("num_pages", [1, 3, 10, 11, 32, 101])
@pytest.mark.parametrize("piece_bytes", [8192, 8 * MiB])
def test_payload_is_read_back_into_runs_of_pages(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch, num_pages: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(segments, "PIECE_BYTES", piece_bytes)
    store = open_store()
    header, payload = make_entry(1, num_pages)
    memory = pages_of(2 * len(payload) + 4 * BLOCK_BYTES)
    cut = min(len(payload), 2 * BLOCK_BYTES)
    later = memory[4 * BLOCK_BYTES :]
    chunks = [chunk for chunk in (memory[:cut], later[: len(payload) - cut]) if len(chunk)]
    chunks[0][:] = payload[:cut]
    later[: len(payload) - cut] = payload[cut:]
    reservation = store.reserve(len(payload))
    ref = store.write(reservation, header, chunks)
    assert fetch(store, ref) == payload
    memory[:] = bytes(len(memory))
    store.read(ref, store.read_header(ref), chunks)
    assert b"".join(chunks) == payload
    assert bytes(later[len(payload) - cut :]) == bytes(len(later) - len(payload) + cut)
    assert store.written_bytes == len(payload) and store.read_bytes == 2 * len(payload)


@pytest.mark.parametrize("cuts", [[1], [100, 5000], [4097], [38_000, 38_300]])
def test_chunks_may_lie_anywhere(store: SsdStore, cuts: list[int]) -> None:
    header, payload = make_entry(2, 100)
    data = bytearray(len(payload) + 1)
    bounds = [0, *cuts, len(payload)]
    chunks = [memoryview(data)[1:][begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    for chunk, begin in zip(chunks, bounds, strict=False):
        chunk[:] = payload[begin : begin + len(chunk)]
    reservation = store.reserve(len(payload))
    ref = store.write(reservation, header, chunks)
    data[:] = bytes(len(data))
    store.read(ref, store.read_header(ref), chunks)
    assert data[1:] == payload


class _Noted(Files):
    """Notes what is read of payloads: where, and into buffers of which sizes."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, list[int]]] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads.append((offset, [len(buffer) for buffer in buffers]))
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("num_pages", [1, 10, 11, 32, 101])
@pytest.mark.parametrize("piece_bytes", [8192, 8 * MiB])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_extent_is_read_without_the_others(
    open_store: Callable[..., SsdStore],
    monkeypatch: pytest.MonkeyPatch,
    num_pages: int,
    piece_bytes: int,
    is_restarted: bool,
) -> None:
    monkeypatch.setattr(segments, "PIECE_BYTES", piece_bytes)
    store = open_store()
    put(store, *make_entry(1))
    header, payload = make_entry(2, num_pages)
    put(store, header, payload)
    files = _Noted()
    if is_restarted:
        store = open_store(files=files)
    (ref,) = store.find(header.lookup_key)
    found = store.read_header(ref)
    size = len(payload) // 3
    for number in range(3):
        files.reads.clear()
        assert store.read_extent(ref, found, number) == payload[number * size : (number + 1) * size]
        for offset, sizes in files.reads:  # what direct I/O wants
            assert not any(each % BLOCK_BYTES for each in (offset, *sizes))
        assert sum(sum(sizes) for _, sizes in files.reads) < size + 2 * BLOCK_BYTES
    assert store.read_bytes == len(payload) and not store.errors


def test_damage_elsewhere_is_none_of_an_extents_business(store: SsdStore, tmp_path: Path) -> None:
    header, payload = make_entry(1, 100)
    ref = put(store, header, payload)
    _flip(tmp_path / "rank-0" / "segment-000001.kv", len(payload) // 2)
    assert store.read_extent(ref, header, 2) == payload[-len(payload) // 3 :]
    with pytest.raises(BadEntry) as caught:
        store.read_extent(ref, header, 1)
    assert caught.value.reason == "checksum" and ref not in store and store.errors == {"checksum": 1}
    with pytest.raises(BadEntry) as caught:
        store.read_extent(ref, header, 2)
    assert caught.value.reason == "missing" and store.errors == {"checksum": 1}


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_extent_that_is_not_there_is_a_miss(store: SsdStore, tmp_path: Path, is_cut: bool) -> None:
    header, payload = make_entry(1, 100)
    ref = put(store, header, payload)
    path = tmp_path / "rank-0" / "segment-000001.kv"
    if is_cut:
        os.truncate(path, len(payload) - 100)
    else:
        path.unlink()
    with pytest.raises(BadEntry) as caught:
        store.read_extent(ref, header, 2)
    assert caught.value.reason == ("length" if is_cut else "missing") and store.num_entries == 0


def test_header_comes_back_with_the_place_of_its_payload(store: SsdStore) -> None:
    put(store, *make_entry(1))
    header, payload = make_entry(2)
    ref = put(store, header, payload)
    assert store.read_header(ref) == replace(header, payload_offset=BLOCK_BYTES)
    assert (ref.num_bytes, ref.num_tokens) == (len(payload), header.num_tokens)


def test_entry_is_found_only_once_it_is_written(store: SsdStore) -> None:
    header, payload = make_entry(1)
    reservation = store.reserve(len(payload))
    assert store.find(header.lookup_key) == [] and store.num_entries == 0
    ref = store.write(reservation, header, [payload])
    assert store.find(header.lookup_key) == [ref] and store.num_entries == 1
    with pytest.raises(ValueError, match="not held any more"):
        store.write(reservation, header, [payload])


def test_released_space_is_used_again(store: SsdStore) -> None:
    first = store.reserve(10_000)
    assert first is not None and store.used_bytes >= 12_288
    store.release(first)
    store.release(first)
    second = store.reserve(5_000)
    assert second is not None and second.offset == first.offset
    store.release(second)
    assert store.used_bytes == 0


@pytest.mark.parametrize("sizes", [(1000, 1152, 1152), (1152, 1000, 1152), (1152, 1152, 1000)])
def test_sizes_that_differ_are_refused_and_cost_nothing(store: SsdStore, sizes: tuple[int, int, int]) -> None:
    header, payload = make_entry(1)
    assert len(payload) == 1152
    reservation = store.reserve(sizes[0])
    smaller = make_entry(1, 2)[0] if sizes[1] != 1152 else header
    with pytest.raises(ValueError, match="reserved"):
        store.write(reservation, smaller, [payload[: sizes[2]]])
    assert store.used_bytes == 0 and not store.errors


def test_space_is_counted_as_the_disk_does(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store(segment_bytes=4 * MiB)
    refs = [put(store, *make_entry(seed, 100)) for seed in range(150)]
    assert store.used_bytes == pytest.approx(disk_bytes(tmp_path / "rank-0"), abs=64 << 10)
    for ref in refs[::2]:
        store.remove(ref)
    before = store.used_bytes
    assert store.reclaim() == 75 * 40_960
    assert store.used_bytes == before - 75 * 40_960
    assert store.used_bytes == pytest.approx(disk_bytes(tmp_path / "rank-0"), abs=64 << 10)
    used = store.used_bytes
    store = open_store(segment_bytes=4 * MiB)
    store.reclaim()
    assert store.used_bytes == used
    for header in (make_entry(seed, 100)[0] for seed in range(1, 150, 2)):
        store.remove(*store.find(header.lookup_key))
    store.reclaim()
    assert store.used_bytes == disk_bytes(tmp_path / "rank-0") == 0


class _WithLists(Files):
    """A file system that counts a block of its own with each file."""

    def stat(self, path: str) -> tuple[int, int] | None:
        found = super().stat(path)
        return found and (found[0], found[1] + BLOCK_BYTES)


def test_blocks_of_the_file_system_are_no_dead_payload(open_store: Callable[..., SsdStore]) -> None:
    store = open_store()
    for seed in range(3):
        put(store, *make_entry(seed))
    used = store.used_bytes
    store = open_store(files=_WithLists())
    store.reclaim()
    assert store.used_bytes == used


def test_payload_that_was_never_published_is_given_back(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store()
    put(store, *make_entry(1, 100))
    used = store.used_bytes
    store.close()
    kv = tmp_path / "rank-0" / "segment-000001.kv"
    kv.write_bytes(kv.read_bytes() + bytes([1]) * MiB)
    (tmp_path / "rank-0" / "segment-000007.kv").write_bytes(bytes([1]) * MiB)
    store = open_store()
    store.reclaim()
    assert store.used_bytes == used and store.num_entries == 1
    assert disk_bytes(tmp_path / "rank-0") == used


def test_capacity_is_kept_and_room_is_made(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store(8 * MiB)
    number = 0
    refs: list[Ref] = []
    for seed in range(400):
        header, payload = make_entry(seed % 7, 100 + seed % 50)
        reservation = store.reserve(len(payload))
        if reservation is None:
            assert store.used_bytes > 7.9 * MiB
            for ref in oldest(store, MiB, refs[:2]):
                store.remove(ref)
                number += 1
            assert store.reclaim() >= MiB
            reservation = store.reserve(len(payload))
        refs.append(store.write(reservation, header, [payload]))
        assert store.used_bytes <= 8 * MiB
    assert number and store.num_entries == 400 - number and not store.errors
    assert disk_bytes(tmp_path / "rank-0") <= 8 * MiB
    assert all(ref in store for ref in refs[:2])


def test_smaller_capacity_drops_the_oldest_segments(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store(segment_bytes=4 * MiB)
    entries = [make_entry(seed, 1000) for seed in range(30)]
    refs = [put(store, *entry) for entry in entries]
    assert refs[-1].segment == 3
    store = open_store(9 * MiB)
    store.reclaim()
    assert store.num_entries == 20 and store.used_bytes <= 9 * MiB and not store.errors
    assert [bool(store.find(header.lookup_key)) for header, _ in entries] == [False] * 10 + [True] * 20
    assert disk_bytes(tmp_path / "rank-0") <= 9 * MiB
    assert open_store(MiB).num_entries == 0


def test_dead_bytes_cost_no_entry_at_the_start(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store(8 * MiB)
    while (reservation := store.reserve(384_000)) is not None:
        header, payload = make_entry(reservation.offset, 1000)
        store.write(reservation, header, [payload])
    number = store.num_entries
    store.close()
    with (tmp_path / "rank-0" / "segment-000001.kv").open("ab") as file:
        file.write(bytes([1]) * MiB)
    (tmp_path / "rank-0" / "segment-000009.kv").write_bytes(bytes([1]) * MiB)
    store = open_store(8 * MiB, files=_WithLists())
    store.reclaim()
    assert store.num_entries == number == 20 and store.used_bytes <= 8 * MiB


def test_entry_larger_than_a_segment_has_one_of_its_own(open_store: Callable[..., SsdStore]) -> None:
    store = open_store(segment_bytes=1)
    entries = [make_entry(seed, num_pages) for seed, num_pages in enumerate((1, 14_000, 1))]
    refs = [put(store, *entry) for entry in entries]
    assert len({ref.segment for ref in refs}) == 3
    assert [fetch(store, ref) == payload for ref, (_, payload) in zip(refs, entries, strict=True)] == [True] * 3


def test_entries_come_oldest_first(open_store: Callable[..., SsdStore]) -> None:
    store = open_store(segment_bytes=4 * MiB)
    refs = [put(store, *make_entry(seed, 1000)) for seed in range(30)]
    store.remove(refs[1])
    assert store.entries_behind(None, 1) == [refs[0]]
    assert store.entries_behind(refs[0], 1000) == refs[2:]


def test_removed_entry_is_a_miss_and_no_error(store: SsdStore) -> None:
    header, payload = make_entry(1)
    ref = put(store, header, payload)
    store.remove(ref)
    store.remove(ref)
    assert ref not in store
    newer = put(store, header, payload)
    for work in (lambda: store.read_header(ref), lambda: store.read(ref, header, [memoryview(bytearray(1152))])):
        with pytest.raises(BadEntry) as caught:
            work()
        assert caught.value.reason == "missing"
    assert not store.errors and fetch(store, newer) == payload


class _Racing(Files):
    """Runs ``meanwhile`` before each read of a payload."""

    meanwhile: Callable[[], None] | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.meanwhile is not None:
            self.meanwhile()
        return super().preadv(fd, buffers, offset)


def test_reader_that_races_with_a_removal_misses(open_store: Callable[..., SsdStore]) -> None:
    files = _Racing()
    store = open_store(files=files)
    header, payload = make_entry(1, 100)
    ref = put(store, header, payload)
    files.meanwhile = lambda: (store.remove(ref), store.reclaim(), None)[-1]
    with pytest.raises(BadEntry) as caught:
        store.read(ref, header, [memoryview(bytearray(len(payload)))])
    assert caught.value.reason == "missing" and not store.errors


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "spoil", "reason"),
    [
        ("kv", lambda path: _flip(path, 1000), "checksum"),
        ("kv", lambda path: os.truncate(path, 1000), "length"),
        ("kv", Path.unlink, "missing"),
        ("head", lambda path: _flip(path, 200), "header"),
        ("head", lambda path: os.truncate(path, 40), "length"),
        ("head", Path.unlink, "missing"),
    ],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_bad_entry_is_a_miss_once_and_never_served_again(
    open_store: Callable[..., SsdStore],
    tmp_path: Path,
    suffix: str,
    spoil: Callable[[Path], None],
    reason: str,
    is_restarted: bool,
) -> None:
    store = open_store()
    header, payload = make_entry(1)
    put(store, header, payload)
    if is_restarted:
        store.close()
    spoil(tmp_path / "rank-0" / f"segment-000001.{suffix}")
    if is_restarted:
        store = open_store()
    for ref in store.find(header.lookup_key):
        with pytest.raises(BadEntry) as caught:
            fetch(store, ref)
        assert caught.value.reason == reason
        assert ref not in store
    assert store.find(header.lookup_key) == [] and store.num_entries == 0
    is_without_trace = is_restarted and (suffix, reason) == ("head", "missing")
    assert store.errors == ({} if is_without_trace else {reason: 1})
    store = open_store()
    assert store.find(header.lookup_key) == []
    ref = put(store, header, payload)
    assert fetch(store, ref) == payload


def test_torn_tail_costs_only_the_last_entry(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store()
    entries = [make_entry(seed) for seed in range(3)]
    for entry in entries:
        put(store, *entry)
    store.close()
    head = tmp_path / "rank-0" / "segment-000001.head"
    whole = head.read_bytes()
    kept = len(whole) * 2 // 3
    for size in [*range(kept, len(whole), 7), len(whole) - 1]:
        head.write_bytes(whole[:size])
        store = open_store()
        assert [fetch(store, store.find(header.lookup_key)[0]) == payload for header, payload in entries[:2]] == [
            True,
            True,
        ]
        assert store.find(entries[2][0].lookup_key) == []
        assert store.errors == ({} if size == kept else {"length": 1})
        store.close()
        assert head.stat().st_size == kept
    head.write_bytes(whole[:kept] + bytes(len(whole) - kept))
    assert open_store().num_entries == 2


def test_damage_between_records_costs_only_what_is_damaged(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store()
    entries = [make_entry(seed) for seed in range(4)]
    refs = [put(store, *entry) for entry in entries]
    store.remove(refs[0])
    store.close()
    head = tmp_path / "rank-0" / "segment-000001.head"
    whole = head.read_bytes()
    size = (len(whole) - 40) // 4
    for offset in range(size, 2 * size, 11):
        head.write_bytes(whole)
        _flip(head, offset)
        shutil.copy(head, tmp_path / "damaged")
        store = open_store()
        found = [len(store.find(header.lookup_key)) for header, _ in entries]
        assert found == [0, 0, 1, 1] and store.errors.total() == 1
        assert fetch(store, store.find(entries[3][0].lookup_key)[0]) == entries[3][1]
        store.close()


def test_other_format_is_not_served(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store()
    for seed in range(2):
        put(store, *make_entry(seed))
    store.close()
    head = tmp_path / "rank-0" / "segment-000001.head"
    data = bytearray(head.read_bytes())
    data[8:10] = (999).to_bytes(2, "little")
    head.write_bytes(data)
    store = open_store()
    assert store.num_entries == 1 and store.errors == {"version": 1}


def test_a_folder_of_another_format_is_left_to_who_knows_it(
    open_store: Callable[..., SsdStore], tmp_path: Path
) -> None:
    store = open_store()
    header, payload = make_entry(1)
    put(store, header, payload)
    store.close()
    head = tmp_path / "rank-0" / "segment-000001.head"
    before = head.read_bytes()
    head.write_bytes(before[:8] + (999).to_bytes(2, "little") + before[10:])
    store = open_store()
    assert store.num_entries == 0
    store.reclaim()
    store.close()
    head.write_bytes(before)  # the server that wrote it is back
    store = open_store()
    assert fetch(store, store.find(header.lookup_key)[0]) == payload


def test_garbage_counts_as_such_until_it_is_given_back(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    refs = [put(store, *make_entry(seed, 1000)) for seed in range(8)]
    for ref in refs[:4]:
        store.remove(ref)
    before, punch, seen = store.garbage_bytes, store._disk.punch, list[int]()
    monkeypatch.setattr(store._disk, "punch", lambda *asked: (seen.append(store.garbage_bytes), punch(*asked)))
    assert before > 0 and store.reclaim() == before
    assert seen == [before] and store.garbage_bytes == 0


def test_entries_of_another_model_are_not_served_and_go_when_room_is_needed(
    open_store: Callable[..., SsdStore], tmp_path: Path
) -> None:
    store = open_store(8 * MiB)
    foreign = [put(store, *make_entry(seed, 1000)) for seed in range(15)]
    other = bytes(16)
    store = open_store(8 * MiB, other)
    assert store.num_entries == 0 and store.errors == {"fingerprint": 15}
    assert store.used_bytes > 15 * foreign[0].num_bytes
    assert store.reclaim() == 0
    header, payload = make_entry(50, 7000, other)
    assert store.reserve(len(payload)) is None
    assert store.reclaim() > 0
    assert fetch(store, put(store, header, payload)) == payload
    assert store.used_bytes <= 8 * MiB
    store = open_store(8 * MiB)
    assert 0 < store.num_entries < 15


def test_entries_of_another_model_go_before_any_of_ours(open_store: Callable[..., SsdStore]) -> None:
    store, number, other = open_store(8 * MiB, segment_bytes=MiB), 18, bytes(16)
    for seed in range(number):
        put(store, *make_entry(seed, 1000))
    store = open_store(8 * MiB, other, segment_bytes=MiB)
    ours = put(store, *make_entry(50, 1000, other))
    used = store.used_bytes
    assert store.garbage_bytes == 0
    store.give_up_foreign(3 * MiB)
    assert store.garbage_bytes >= 3 * MiB, "it counts as good as given back"
    assert store.reclaim() >= 3 * MiB and store.used_bytes <= used - 3 * MiB
    assert ours in store and open_store(8 * MiB, segment_bytes=MiB).num_entries < number


def test_folder_is_for_one_store_at_a_time(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    open_store()
    with pytest.raises(StoreError, match=f"rank-0 is in use by process {os.getpid()}"):
        SsdStore(tmp_path / "rank-0", CAPACITY, FINGERPRINT)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file/rank-0 cannot be made: Not a directory"):
        SsdStore(tmp_path / "file" / "rank-0", CAPACITY, FINGERPRINT)
    with pytest.raises(StoreError, match="file cannot be made: File exists"):
        SsdStore(tmp_path / "file", CAPACITY, FINGERPRINT)


@pytest.mark.parametrize(("capacity", "sync"), [(0, "none"), (CAPACITY, "sometimes")])
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, capacity: int, sync: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        SsdStore(tmp_path, capacity, FINGERPRINT, sync=sync)


class _NoHoles(Files):
    def punch_hole(self, fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")


def test_without_holes_whole_segments_are_dropped(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store(segment_bytes=4 * MiB, files=_NoHoles())
    refs = [put(store, *make_entry(seed, 1000)) for seed in range(20)]
    first = [ref for ref in refs if ref.segment == 1]
    assert len(first) == 10
    used = store.used_bytes
    for ref in first[:4]:
        store.remove(ref)
    assert store.reclaim() == 0 and store.used_bytes == pytest.approx(used, abs=4096)
    for ref in first[4:6]:
        store.remove(ref)
    assert store.reclaim() > 10 * 385_024
    assert not any(ref in store for ref in first)
    assert store.used_bytes == pytest.approx(disk_bytes(tmp_path / "rank-0"), abs=64 << 10)
    with pytest.raises(BadEntry):
        store.read_header(first[9])
    assert not store.errors


def test_segment_with_more_dead_records_than_live_payload_is_dropped(open_store: Callable[..., SsdStore]) -> None:
    store = open_store(segment_bytes=4 * MiB)
    refs = [put(store, *make_entry(seed, 10)) for seed in range(1100)]
    first = [ref for ref in refs if ref.segment == 1]
    assert len(first) == 1024
    for ref in first[1:]:
        store.remove(ref)
    assert store.reclaim() > 1023 * BLOCK_BYTES
    assert first[0] not in store and store.num_entries == 76 and not store.errors


class _Failing(Files):
    """Fails in ``method`` with ``code`` as long as that is set."""

    code: int | None = None
    method = "pwritev"

    def _maybe(self, method: str) -> None:
        if self.code is not None and method == self.method:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            self._maybe("open")
        return super().open(path, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.code is not None and self.method == "pwritev":
            super().pwritev(fd, buffers, offset)  # some of it has arrived
        self._maybe("pwritev")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe("preadv")
        return super().preadv(fd, buffers, offset)

    def append(self, fd: int, data: bytes) -> int:
        if self.code is not None and self.method == "append":
            super().append(fd, data[:50])
        self._maybe("append")
        return super().append(fd, data)


@pytest.mark.parametrize("method", ["pwritev", "append"])
@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "full"), (errno.EIO, "io")])
def test_failed_write_is_counted_and_its_space_given_back(
    open_store: Callable[..., SsdStore], tmp_path: Path, method: str, code: int, reason: str
) -> None:
    files = _Failing()
    files.method = method
    store = open_store(files=files, backoff_s=0.01)
    kept = put(store, *make_entry(1))
    used = store.used_bytes
    header, payload = make_entry(2, 1000)
    reservation = store.reserve(len(payload))
    files.code = code
    with pytest.raises(OSError):
        store.write(reservation, header, [payload])
    assert store.errors == {reason: 1} and store.used_bytes == used and store.find(header.lookup_key) == []
    assert disk_bytes(tmp_path / "rank-0") == used
    files.code = None
    while not store.is_writable:
        assert store.reserve(1) is None or store.is_writable
    assert fetch(store, put(store, header, payload)) == payload
    store = open_store()
    assert store.num_entries == 2 and not store.errors
    assert fetch(store, store.find(make_entry(1)[0].lookup_key)[0]) and kept.num_bytes == 1152


def test_writing_pauses_after_a_failure(open_store: Callable[..., SsdStore]) -> None:
    files = _Failing()
    store = open_store(files=files, backoff_s=1000.0)
    header, payload = make_entry(1)
    reservations = [store.reserve(len(payload)) for _ in range(2)]
    files.code = errno.EIO
    for reservation in reservations:
        with pytest.raises(OSError):
            store.write(reservation, header, [payload])
    assert not store.is_writable and store.reserve(1) is None and store.errors == {"io": 2}


@pytest.mark.parametrize(("method", "code", "is_kept"), [("preadv", errno.EIO, False), ("open", errno.EMFILE, True)])
def test_read_error_is_a_miss(open_store: Callable[..., SsdStore], method: str, code: int, is_kept: bool) -> None:
    files = _Failing()
    store = open_store(files=files)
    header, payload = make_entry(1)
    ref = put(store, header, payload)
    files.method, files.code = method, code
    with pytest.raises(BadEntry) as caught:
        store.read(ref, header, [memoryview(bytearray(len(payload)))])
    files.code = None
    assert caught.value.reason == ("shortage" if is_kept else "io") and store.errors == {"io": 1}
    assert (ref in store) == is_kept
    assert open_store().num_entries == is_kept


def test_start_survives_a_head_that_cannot_be_read(open_store: Callable[..., SsdStore]) -> None:
    put(open_store(), *make_entry(1))
    files = _Failing()
    files.method, files.code = "preadv", errno.EIO
    store = open_store(files=files)
    assert store.num_entries == 0 and store.errors.total() == 1
    files.code = None
    header, payload = make_entry(2)
    assert fetch(store, put(store, header, payload)) == payload


def test_tombstone_that_could_not_be_written_is_tried_again(open_store: Callable[..., SsdStore]) -> None:
    files = _Failing()
    store = open_store(files=files)
    refs = [put(store, *make_entry(seed)) for seed in range(2)]
    files.method, files.code = "append", errno.ENOSPC
    store.remove(refs[0])
    assert refs[0] not in store and store.errors == {"full": 1}
    files.code = None
    store.reclaim()
    store = open_store()
    assert store.num_entries == 1 and store.find(make_entry(0)[0].lookup_key) == []


class _Small(Files):
    free = 100 * MiB

    def free_bytes(self) -> tuple[int, int]:
        return self.free, 200 * MiB


def test_some_of_the_disk_is_left_to_others(open_store: Callable[..., SsdStore]) -> None:
    store = open_store(files=_Small())
    first = store.reserve(30 * MiB)
    assert first is not None
    assert store.reserve(10 * MiB) is None
    store.release(first)
    assert store.reserve(10 * MiB) is not None


def test_a_file_system_that_others_have_filled_takes_nothing_for_a_while(open_store: Callable[..., SsdStore]) -> None:
    files = _Small()
    store = open_store(files=files, backoff_s=0.2)
    files.free = 60 * MiB
    time.sleep(0.06)  # the last answer is asked for again
    assert store.is_writable and store.reserve(MiB) is None
    assert not store.is_writable and store.errors == {"full": 1}
    files.free = 100 * MiB
    time.sleep(0.25)
    assert store.is_writable and store.reserve(MiB) is not None


def test_what_was_not_synced_is_synced_the_next_time(open_store: Callable[..., SsdStore]) -> None:
    files, synced = _Failing(), list[int]()
    store = open_store(files=files)
    put(store, *make_entry(1))
    files.method, files.code = "open", errno.EMFILE
    store.sync()
    assert store.errors == {"io": 1}
    files.code, files.fdatasync = None, synced.append
    store.sync()
    assert len(synced) == 2
    store.sync()
    assert len(synced) == 2


class _Recorder(Files):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.suffixes: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self.suffixes[fd] = Path(path).suffix
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append(f"write {self.suffixes[fd]}")
        return super().pwritev(fd, buffers, offset)

    def append(self, fd: int, data: bytes) -> int:
        self.calls.append(f"append {self.suffixes[fd]}")
        return super().append(fd, data)

    def fdatasync(self, fd: int) -> None:
        self.calls.append(f"sync {self.suffixes[fd]}")
        super().fdatasync(fd)

    def sync_folder(self) -> None:
        self.calls.append("sync names")
        super().sync_folder()


def test_always_means_payload_then_record_then_names_are_durable(tmp_path: Path) -> None:
    files = _Recorder()
    store = SsdStore(tmp_path, CAPACITY, FINGERPRINT, sync="always", files=files)
    put(store, *make_entry(1))
    assert files.calls == ["write .kv", "sync .kv", "append .head", "sync .head", "sync names"]
    put(store, *make_entry(2))
    assert files.calls[5:] == ["write .kv", "sync .kv", "append .head", "sync .head"]
    store.close()


def test_sync_and_close_make_the_rest_durable(open_store: Callable[..., SsdStore]) -> None:
    files = _Recorder()
    store = open_store(files=files)
    ref = put(store, *make_entry(1))
    store.sync()
    assert files.calls[2:] == ["sync .kv", "sync .head", "sync names"]
    store.sync()
    assert len(files.calls) == 5
    store.remove(ref)
    store.close()
    assert files.calls[5:] == ["append .head", "sync .kv", "sync .head"]


def test_closed_store_serves_nothing(open_store: Callable[..., SsdStore]) -> None:
    store = open_store()
    header, payload = make_entry(1)
    ref = put(store, header, payload)
    reservation = store.reserve(len(payload))
    assert reservation is not None
    store.close()
    store.close()
    assert store.find(header.lookup_key) == [] and store.reserve(1) is None and not store.is_writable
    with pytest.raises(BadEntry):
        store.read_header(ref)
    with pytest.raises(OSError):
        store.write(reservation, header, [payload])
    assert open_store().num_entries == 1


def test_many_threads_may_use_it(open_store: Callable[..., SsdStore], tmp_path: Path) -> None:
    store = open_store(6 * MiB)
    wrong: list[object] = []
    counts = [0, 0]

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(100):
            number = draw.randrange(8)
            header, payload = make_entry(number, 50 + 20 * draw.randrange(30))
            found = store.find(header.lookup_key)
            if found and draw.random() < 0.7:
                ref = draw.choice(found)
                if draw.random() < 0.2:
                    store.remove(ref)
                    continue
                try:
                    data = fetch(store, ref)
                except BadEntry as error:
                    assert error.reason == "missing"
                else:
                    counts[0] += 1
                    assert data == make_entry(number, len(data) // 384)[1]
                continue
            reservation = store.reserve(len(payload))
            if reservation is None:
                for ref in oldest(store, MiB):
                    store.remove(ref)
                store.reclaim()
            elif draw.random() < 0.1:
                store.release(reservation)
            else:
                store.write(reservation, header, [payload])
                counts[1] += 1

    def run(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:  # noqa: BLE001 - told to the test
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not store.errors and min(counts) > 20
    store.reclaim()
    used, number = store.used_bytes, store.num_entries
    assert used <= 6 * MiB and used == pytest.approx(disk_bytes(tmp_path / "rank-0"), abs=64 << 10)
    store = open_store(6 * MiB)
    store.reclaim()
    assert (store.used_bytes, store.num_entries) == (used, number)


class _Machine(RuleBasedStateMachine):
    """The store against a list of what it has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.held: list[tuple[Ref, Header, memoryview]] = []
        self.open()

    def open(self) -> None:
        self.store = SsdStore(self.folder, 12 * MiB, FINGERPRINT, sync="none", segment_bytes=4 * MiB)

    @rule(seed=st.integers(0, 5), num_pages=st.integers(1, 2000))
    def write(self, seed: int, num_pages: int) -> None:
        header, payload = make_entry(seed, num_pages)
        reservation = self.store.reserve(len(payload))
        if reservation is None:
            assert self.store.used_bytes + len(payload) + len(payload) // 32 + 2 * BLOCK_BYTES > 12 * MiB
        else:
            self.held.append((self.store.write(reservation, header, [payload]), header, payload))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        ref, header, payload = data.draw(st.sampled_from(self.held))
        same = [other for other, of, _ in self.held if of.lookup_key == header.lookup_key]
        assert self.store.find(header.lookup_key) == same[::-1], "the newest comes first"
        assert fetch(self.store, ref) == payload

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.held) - 1))
        self.store.remove(self.held.pop(number)[0])

    @rule()
    def reclaim(self) -> None:
        self.store.reclaim()
        payloads = sum(-(-len(payload) // BLOCK_BYTES) * BLOCK_BYTES for _, _, payload in self.held)
        heads = sum(path.stat().st_blocks * 512 for path in self.folder.glob("*.head"))
        assert self.store.used_bytes == payloads + heads

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()
        assert not self.store.errors
        by_lookup_key: dict[int, list[tuple[Header, memoryview]]] = {}
        for _, header, payload in self.held:
            by_lookup_key.setdefault(header.lookup_key, []).insert(0, (header, payload))
        self.held = []
        for lookup_key, entries in by_lookup_key.items():
            refs = self.store.find(lookup_key)
            assert [ref.num_bytes for ref in refs] == [len(payload) for _, payload in entries]
            self.held += [(ref, *entry) for ref, entry in zip(refs, entries, strict=True)]
        self.held.sort(key=lambda held: (held[0].segment, held[0].row))

    @invariant()
    def counts(self) -> None:
        assert self.store.num_entries == len(self.held)
        assert self.store.used_bytes <= 12 * MiB

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


TestMachine = _Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
