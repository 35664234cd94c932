"""A folder that somebody else has prepared: refused or a miss, never a hit, and nothing outside of it is touched."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.tiers.ssd.test_ssd import CAPACITY, FINGERPRINT, disk_bytes, fetch, make_entry, put

from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.ssd.folder import StoreError
from sglang_evicpress.tiers.ssd.fsck import fsck
from sglang_evicpress.tiers.ssd.store import SsdStore

NOBODY = 65534
VICTIM = b"what the server's user holds dear\n" * 200


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(VICTIM)
    return path


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    """A folder with one entry, as a stopped server leaves it."""
    folder = tmp_path / "kv" / "rank-0"
    store = open_store(folder)
    put(store, *make_entry(1))
    store.close()
    return folder


def open_store(folder: Path) -> SsdStore:
    return SsdStore(folder, CAPACITY, FINGERPRINT, sync="none")


def disown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the path another user's, as far as a test may."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def _listens(path: Path, victim: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: os.link(victim, path),
    "pipe": lambda path, victim: os.mkfifo(path),
    "socket": _listens,
    "folder": lambda path, victim: path.mkdir(),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("made")),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_planted_lock_is_refused_and_changes_nothing(
    rank: Path, victim: Path, plant: Callable[[Path, Path], object]
) -> None:
    (rank / "lock").unlink()
    plant(rank / "lock", victim)
    for use in (lambda: open_store(rank), lambda: fsck(rank, repair=True)):
        with pytest.raises(StoreError, match="rank-0 cannot be locked: .*lock") as caught:
            use()
        assert str(caught.value).count("\n") == 0
    assert victim.read_bytes() == VICTIM and not victim.with_name("made").exists()


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
@pytest.mark.parametrize("suffix", ["head", "kv"])
def test_a_planted_segment_is_a_miss_and_changes_nothing(
    rank: Path, victim: Path, suffix: str, plant: Callable[[Path, Path], object]
) -> None:
    path = rank / f"segment-000001.{suffix}"
    victim.write_bytes(path.read_bytes())  # even where it says just what the entry was
    before = victim.read_bytes()
    path.unlink()
    plant(path, victim)
    store = open_store(rank)
    for ref in store.find(make_entry(1)[0].lookup_key):
        with pytest.raises(BadEntry):
            fetch(store, ref)
    assert store.errors.total() > 0
    assert store.find(make_entry(1)[0].lookup_key) == []
    header, payload = make_entry(2)
    assert fetch(store, put(store, header, payload)) == payload
    store.reclaim()
    store.close()
    assert victim.read_bytes() == before and not victim.with_name("made").exists()
    fsck(rank, repair=False)
    assert victim.read_bytes() == before and not victim.with_name("made").exists()


@pytest.mark.parametrize("suffix", ["head", "kv"])
def test_a_file_planted_for_the_next_segment_is_not_written_to(rank: Path, victim: Path, suffix: str) -> None:
    """Its number is taken by what lies there when the server starts, and a name that comes later is refused."""
    store = open_store(rank)
    (rank / f"segment-000002.{suffix}").symlink_to(victim)
    header, payload = make_entry(2)
    reservation = store.reserve(len(payload))
    with pytest.raises(OSError):
        store.write(reservation, header, [payload])
    store.close()
    assert victim.read_bytes() == VICTIM


def test_a_leftover_that_is_a_link_is_removed_and_not_followed(rank: Path, victim: Path) -> None:
    for name in ("segment-000001.head.new", "segment-000009.head.new"):
        (rank / name).symlink_to(victim)
    with (rank / "segment-000001.head").open("ab") as file:
        file.write(b"torn")
    fsck(rank, repair=True)
    assert victim.read_bytes() == VICTIM
    assert fetch_one(rank) and not list(rank.glob("*.new"))


def fetch_one(rank: Path) -> bool:
    store = open_store(rank)
    header, payload = make_entry(1)
    try:
        return any(fetch(store, ref) == payload for ref in store.find(header.lookup_key))
    except BadEntry:
        return False
    finally:
        store.close()


@pytest.mark.parametrize("name", ["lock", "segment-000001.head", "segment-000001.kv"])
@pytest.mark.parametrize("is_owned", [False, True])
def test_a_file_of_another_user_or_that_others_may_write_is_no_hit(
    rank: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_owned: bool
) -> None:
    if is_owned:
        (rank / name).chmod(0o666)
    else:
        disown(rank / name, monkeypatch)
    if name == "lock" or (not is_owned and os.geteuid() == NOBODY):
        with pytest.raises(StoreError, match="rank-0"):
            open_store(rank)
    else:
        assert not fetch_one(rank)


def test_a_folder_of_another_user_is_refused(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disown(rank, monkeypatch)
    size = disk_bytes(rank)
    with pytest.raises(StoreError, match=r"rank-0 belongs to user \d+: expected one of user \d+ \(chown"):
        open_store(rank)
    with pytest.raises(StoreError, match="belongs to user"):
        fsck(rank, repair=True)
    assert disk_bytes(rank) == size


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_may_write_is_refused(rank: Path, mode: int) -> None:
    rank.chmod(mode)
    with pytest.raises(StoreError, match=rf"rank-0 can be written by others \(mode 0{mode:o}\): .*chmod go-w"):
        open_store(rank)


def test_a_folder_that_is_a_link_is_refused(rank: Path) -> None:
    link = rank.parent / "rank-1"
    link.symlink_to(rank)
    with pytest.raises(StoreError, match="rank-1 is a symbolic link: expected the folder itself"):
        open_store(link)
    (rank.parent.parent / "there").symlink_to(rank.parent)  # above the folder the operator may have links
    assert fetch_one(rank.parent.parent / "there" / "rank-0")


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        open_store(tmp_path / "a" / "b").close()
    finally:
        os.umask(former)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_folder_that_is_swapped_afterwards_is_not_followed(rank: Path) -> None:
    """All is opened relative to the folder that was checked."""
    store = open_store(rank)
    rank.rename(rank.parent / "moved")
    (rank.parent / "elsewhere").mkdir(mode=0o700)
    rank.symlink_to(rank.parent / "elsewhere")
    header, payload = make_entry(2)
    assert fetch(store, put(store, header, payload)) == payload
    store.sync()
    store.close()
    assert not list((rank.parent / "elsewhere").iterdir())
