"""fsck says what is wrong with a folder, and leaves behind one in which nothing is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.tiers.ssd.test_ssd import FINGERPRINT, MiB, fetch, put
from tests.unit.tiers.ssd.test_ssd import make_entry as make_any_entry

from sglang_evicpress.tiers.entry.header import Header
from sglang_evicpress.tiers.ssd.folder import StoreError
from sglang_evicpress.tiers.ssd.fsck import Report, fsck
from sglang_evicpress.tiers.ssd.store import SsdStore

NUM_ENTRIES = 12
SIZE = 53_248  # of a payload, in whole blocks


def make_entry(number: int) -> tuple[Header, memoryview]:
    return make_any_entry(number, 138)


def found(folder: Path) -> list[int]:
    """The numbers of the entries that a store serves."""
    store = SsdStore(folder, 100 * MiB, FINGERPRINT, sync="none")
    numbers = []
    for number in range(NUM_ENTRIES):
        header, payload = make_entry(number)
        for ref in store.find(header.lookup_key):
            assert fetch(store, ref) == payload
            numbers.append(number)
    assert not store.errors
    store.close()
    return numbers


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    """A rank's folder with two segments, in which entry 3 was removed."""
    folder = tmp_path / "rank-0"
    for numbers in (range(6), range(6, NUM_ENTRIES)):
        store = SsdStore(folder, 100 * MiB, FINGERPRINT, sync="none")
        for number in numbers:
            put(store, *make_entry(number))
        if 3 in numbers:
            store.remove(*store.find(make_entry(3)[0].lookup_key))
        store.close()
    return folder


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_folder_of_a_stopped_server_is_clean(rank: Path) -> None:
    report = fsck(rank.parent, repair=False)
    assert report.is_clean and report.folders == [rank]
    assert (report.num_segments, report.ok) == (2, NUM_ENTRIES - 1)
    assert report.ok_bytes == sum(len(make_entry(number)[1]) for number in range(NUM_ENTRIES) if number != 3)
    assert report.forms == {str(make_entry(0)[0].form): [NUM_ENTRIES - 1, report.ok_bytes]}
    assert f"{make_entry(0)[0].form}: {NUM_ENTRIES - 1} entries, {report.ok_bytes} bytes" in report.lines()
    assert report.lines()[-1] == "clean"
    assert fsck(rank, repair=True).is_clean
    assert found(rank) == [0, 1, 2, *range(4, NUM_ENTRIES)]


def test_every_rank_is_checked(rank: Path) -> None:
    store = SsdStore(rank.parent / "rank-1", 100 * MiB, FINGERPRINT, sync="none")
    put(store, *make_entry(3))
    store.close()
    report = fsck(rank.parent, repair=False)
    assert len(report.folders) == 2 and report.ok == NUM_ENTRIES


def _flip_payload(folder: Path) -> Report:
    flip(folder / "segment-000001.kv", 5)
    return Report(bad={"checksum": 1})


def _flip_record(folder: Path) -> Report:
    flip(folder / "segment-000001.head", 100)
    return Report(bad={"header": 1})


def _tear(folder: Path) -> Report:
    with (folder / "segment-000001.head").open("ab") as file:
        file.write((folder / "segment-000002.head").read_bytes()[:100])
    return Report(torn_tails=1)


def _tear_entry(folder: Path) -> Report:
    path = folder / "segment-000002.head"
    os.truncate(path, path.stat().st_size - 1)
    return Report(torn_tails=1)


def _cut_payload(folder: Path) -> Report:
    path = folder / "segment-000002.kv"
    os.truncate(path, path.stat().st_size - 8192)
    return Report(bad={"length": 1})


def _lose_payload(folder: Path) -> Report:
    (folder / "segment-000002.kv").unlink()
    return Report(bad={"missing": 6})


def _lose_records(folder: Path) -> Report:
    (folder / "segment-000002.head").unlink()
    return Report(orphan_bytes=(folder / "segment-000002.kv").stat().st_blocks * 512)


def _add_payload(folder: Path) -> Report:
    with (folder / "segment-000002.kv").open("ab") as file:
        file.write(bytes([1]) * MiB)
        file.flush()
        os.fsync(file.fileno())
    return Report(orphan_bytes=MiB)


def _fill_hole(folder: Path) -> Report:
    with (folder / "segment-000001.kv").open("r+b") as file:
        file.seek(3 * SIZE)
        file.write(bytes([1]) * 4096)
        file.flush()
        os.fsync(file.fileno())
    return Report(orphan_bytes=4096)


@pytest.mark.parametrize(
    ("spoil", "gone"),
    [
        (_flip_payload, [0]),
        (_flip_record, [0]),
        (_tear, []),
        (_tear_entry, [11]),
        (_cut_payload, [11]),
        (_lose_payload, [6, 7, 8, 9, 10, 11]),
        (_lose_records, [6, 7, 8, 9, 10, 11]),
        (_add_payload, []),
        (_fill_hole, []),
    ],
)
def test_damage_is_found_and_repaired(rank: Path, spoil: Callable[[Path], Report], gone: list[int]) -> None:
    expected = spoil(rank)
    for repair in (False, False, True):
        report = fsck(rank, repair=repair)
        assert not report.is_clean and report.is_repaired == repair
        assert report.lines()[-1] == ("repaired" if repair else "not clean: run again with --repair")
        assert report.bad == expected.bad and report.torn_tails == expected.torn_tails
        assert report.ok == NUM_ENTRIES - 1 - len(gone)
        if expected.orphan_bytes:
            assert report.orphan_bytes == expected.orphan_bytes
    report = fsck(rank, repair=False)
    assert report.is_clean, report.lines()
    assert report.ok == NUM_ENTRIES - 1 - len(gone)
    assert found(rank) == [number for number in range(NUM_ENTRIES) if number not in (3, *gone)]
    assert fsck(rank, repair=False).is_clean


def test_all_that_is_wrong_is_said(rank: Path) -> None:
    for spoil in (_flip_payload, _tear, _add_payload):
        spoil(rank)
    lines = fsck(rank, repair=False).lines()
    assert {"bad by checksum: 1", "torn tails: 1"} <= set(lines)
    assert lines[-2] == f"bytes without a good entry: {SIZE + MiB}"


def test_leftover_of_a_repair_is_removed(rank: Path) -> None:
    leftover = rank / "segment-000001.head.new"
    leftover.write_bytes(b"1")
    assert found(rank) == [0, 1, 2, *range(4, NUM_ENTRIES)] and not leftover.exists()
    leftover.write_bytes(b"1")
    fsck(rank, repair=True)
    assert not leftover.exists()


def test_folder_in_use_is_refused(rank: Path) -> None:
    store = SsdStore(rank, 100 * MiB, FINGERPRINT, sync="none")
    with pytest.raises(StoreError, match=f"rank-0 is in use by process {os.getpid()}"):
        fsck(rank.parent, repair=True)
    store.close()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing is not a folder"):
        fsck(tmp_path / "nothing", repair=False)
