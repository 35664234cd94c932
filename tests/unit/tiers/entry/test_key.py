"""Seals: an entry is a hit for who has its key, a miss for all others, and the key is never shown."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from tests.unit.tiers.ssd.test_ssd import CAPACITY, FINGERPRINT, fetch, make_entry, put

from sglang_evicpress.tiers.entry import header
from sglang_evicpress.tiers.entry.encoding import decode, encode_tombstone, peek
from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.fsck import fsck
from sglang_evicpress.tiers.ssd.store import SsdStore

SECRET = b"a secret of more than 32 bytes, as it should be"
OURS, OTHERS = Key(SECRET), Key(b"another secret of more than 32 bytes")


def open_store(folder: Path, key: Key | None) -> SsdStore:
    return SsdStore(folder, CAPACITY, FINGERPRINT, sync="none", key=key)


def served(folder: Path, key: Key | None, seed: int = 1) -> tuple[bool, dict[str, int]]:
    """Serve the entry: True if it is a hit for a server with this key, and the errors that were counted."""
    store = open_store(folder, key)
    header, payload = make_entry(seed)
    is_hit = False
    for ref in store.find(header.lookup_key):
        try:
            is_hit = is_hit or fetch(store, ref) == payload
        except BadEntry:
            continue
    store.close()
    return is_hit, dict(store.errors)


@pytest.fixture
def rank(tmp_path: Path) -> Callable[[Key | None], Path]:
    def make(key: Key | None) -> Path:
        store = open_store(tmp_path / "rank-0", key)
        put(store, *make_entry(1, 300))
        put(store, *make_entry(1))
        store.close()
        return tmp_path / "rank-0"

    return make


@pytest.mark.parametrize("written", [None, OURS], ids=["plain", "sealed"])
@pytest.mark.parametrize("asked", [None, OURS, OTHERS], ids=["no-key", "ours", "others"])
def test_an_entry_is_a_hit_for_the_same_key_only(
    rank: Callable[[Key | None], Path], written: Key | None, asked: Key | None
) -> None:
    folder = rank(written)
    assert served(folder, asked) == ((True, {}) if asked is written else (False, {"key": 2}))
    assert served(folder, written) == (True, {})  # nothing was lost by having asked


def test_a_server_reads_what_it_has_sealed_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path, OURS)
    header, payload = make_entry(1)
    ref = put(store, header, payload)
    data = bytearray(len(payload))
    store.read(ref, header, [memoryview(data)])  # with the header that has no seals yet
    assert data == payload and len(store.read_header(ref).seals) == 48
    size = len(payload) // 3
    assert b"".join(store.read_extent(ref, header, number) for number in range(3)) == payload
    assert store.read_extent(ref, store.read_header(ref), 1) == payload[size : 2 * size]


def test_an_extent_of_another_key_is_a_miss(rank: Callable[[Key | None], Path]) -> None:
    """It is not even found; a header from elsewhere helps nobody."""
    folder = rank(OURS)
    store = open_store(folder, OURS)
    found = [(ref, store.read_header(ref)) for ref in store.find(make_entry(1)[0].lookup_key)]
    store.close()
    for key in (OTHERS, None):
        store = open_store(folder, key)
        for ref, sealed in found:
            assert store.find(sealed.lookup_key) == []
            with pytest.raises(BadEntry):
                store.read_extent(ref, sealed, 0)
        store.close()


def test_an_extent_in_the_place_of_another_is_a_miss(tmp_path: Path) -> None:
    """Both are sealed, and both headers: a seal is good for its own extent only."""
    store = open_store(tmp_path, OURS)
    refs = [put(store, *make_entry(seed)) for seed in (1, 2)]
    ours, theirs = (store.read_header(ref) for ref in refs)
    mixed = replace(ours, seals=theirs.seals)
    with pytest.raises(BadEntry, match="key"):
        store.read_extent(refs[0], mixed, 2)
    assert store.read_extent(refs[1], theirs, 2) == make_entry(2)[1][-len(make_entry(2)[1]) // 3 :]
    store.close()


def test_without_a_key_the_format_is_what_it_was(rank: Callable[[Key | None], Path]) -> None:
    folder = rank(None)
    record = (folder / "segment-000001.head").read_bytes()
    header, end = decode(record)
    assert record[10:12] == b"\x01\x00" and header.seals == b""
    assert record[end - 16 : end] == xxhash.xxh3_128_digest(record[: end - 16])
    assert encode_tombstone(7)[-16:] == xxhash.xxh3_128_digest(encode_tombstone(7)[:-16])


def _own_checksums(record: bytearray) -> None:
    """Record of a planter: right checksums, and any seal."""
    record[-32:-16] = xxhash.xxh3_128_digest(record[:-32])


@pytest.mark.parametrize("at", [40, 90, -40, -1], ids=["namespace", "field", "seal-of-extent", "seal"])
def test_a_record_that_was_changed_with_its_checksum_is_a_miss(rank: Callable[[Key | None], Path], at: int) -> None:
    folder = rank(OURS)
    head = folder / "segment-000001.head"
    data = bytearray(head.read_bytes())
    _, end = decode(data, key=OURS)
    record = data[end:]
    record[at] ^= 1
    _own_checksums(record)
    head.write_bytes(data[:end] + record)
    assert served(folder, OURS) == (False, {"key": 1})  # what is left of this lookup key is the larger one


@pytest.mark.parametrize("is_alone", [False, True], ids=["payload", "extent"])
def test_a_payload_that_was_changed_with_its_checksums_is_a_miss(
    rank: Callable[[Key | None], Path], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """Changes a payload as if xxh3 had been made to collide."""
    folder = rank(OURS)
    with (folder / "segment-000001.kv").open("r+b") as file:
        file.seek(300 * 384 - 300 * 384 % 4096 + 4096)  # the second payload
        file.write(b"planted")
    store = open_store(folder, OURS)
    (small,) = [ref for ref in store.find(make_entry(1)[0].lookup_key) if ref.num_bytes < 100_000]
    found = store.read_header(small)
    sums = [(extent.num_bytes, extent.digest) for extent in reversed(found.extents)]

    def any_sum(chunks: Iterable[memoryview]) -> tuple[int, bytes]:
        for _ in chunks:
            pass
        return sums.pop()

    monkeypatch.setattr(header, "size_and_digest", any_sum)
    with pytest.raises(BadEntry, match="key: .* not sealed with it"):
        if is_alone:
            store.read_extent(small, found, 0)
        else:
            store.read(small, found, [memoryview(bytearray(small.num_bytes))])
    assert small not in store
    store.close()


def test_a_tombstone_without_the_key_buries_nothing_that_is_sealed(rank: Callable[[Key | None], Path]) -> None:
    folder = rank(OURS)
    head = folder / "segment-000001.head"
    data = head.read_bytes()
    _, second = decode(data, key=OURS)
    head.write_bytes(data + encode_tombstone(second) + encode_tombstone(second, OTHERS))
    assert served(folder, OURS)[0]
    assert peek(encode_tombstone(second, OURS), key=OURS).is_ours
    assert not peek(encode_tombstone(second, OTHERS), key=OURS).is_ours


def test_fsck_checks_what_the_key_has_sealed_and_keeps_the_rest(rank: Callable[[Key | None], Path]) -> None:
    folder = rank(OURS)
    for key in (None, OTHERS):
        report = fsck(folder, repair=True, key=key)
        assert (report.ok, report.unsealed, report.is_clean) == (0, 2, True)
        assert "of another key, or of none, and not checked: 2" in report.lines()
    assert fsck(folder, repair=True, key=OURS).ok == 2
    with (folder / "segment-000001.kv").open("r+b") as file:
        file.write(b"flipped")
    report = fsck(folder, repair=True, key=OURS)
    assert (report.ok, dict(report.bad)) == (1, {"checksum": 1})
    assert served(folder, OURS)[0]


def test_fsck_believes_no_size_of_an_entry_it_cannot_check(rank: Callable[[Key | None], Path]) -> None:
    folder = rank(OURS)
    os.truncate(folder / "segment-000001.kv", 4096)
    report = fsck(folder, repair=True)
    assert (report.unsealed, dict(report.bad)) == (0, {"length": 2})


def key_file(folder: Path, data: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_key_is_read_and_never_shown(tmp_path: Path, mode: int) -> None:
    key = Key.read(str(key_file(tmp_path, mode=mode)))
    assert key.seal_record(b"1") == OURS.seal_record(b"1") != OTHERS.seal_record(b"1")
    assert key.seal_record(b"1") != key.seal_extent([b"1"]) == key.seal_extent([b"", b"1"])
    assert repr(key) == "Key(...)" and str(key) == "Key(...)"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (Path.unlink, "cannot be read (No such file or directory)"),
        (lambda path: path.write_bytes(SECRET[:31]), "holds 31 bytes: expected 32 to 4096"),
        (lambda path: path.write_bytes(SECRET * 100), "holds more bytes: expected 32 to 4096"),
        (lambda path: path.chmod(0o604), "(mode 0604): expected mode 0600"),
        (lambda path: path.chmod(0o620), "(mode 0620): expected mode 0600"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is not a plain file"),
        (lambda path: (path.unlink(), path.mkdir(0o700)), "is not a plain file"),
    ],
)
def test_a_key_file_that_cannot_be_one_is_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    path = key_file(tmp_path)
    spoil(path)
    with pytest.raises(ValueError, match="ssd_key_file") as caught:
        Key.read(str(path))
    text = str(caught.value)
    assert words in text and repr(str(path)) in text and "\n" not in text and "secret" not in text


def test_a_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(ValueError, match=r"belongs to user \d+: expected a file of user \d+ or root"):
        Key.read(str(path))
