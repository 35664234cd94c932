"""Entries as values of an external store, which knows neither sizes nor ranges, and may lose any of them alone.

An entry is found under names that follow from what comes before it, the path's key, and its first tokens: a page of
them, 64 and 512. The value there, an index record, names the values of the entry itself by the digest of its header, so
that values of two writers never mix: the header, and its payload in parts. The index comes last. A name has a few
places, tried in turn: no value is ever replaced, and what stands in one may be another continuation, or dead. Of an
entry that turned out to be damaged the values get other names, by the number of the attempt, which its index has too.
Exact KV and lossy KV are kept apart. Whatever is missing, damaged or of another size is a miss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

import xxhash

from sglang_evicpress.tiers.entry.encoding import decode, encode
from sglang_evicpress.tiers.entry.header import BadEntry, Header, check_part
from sglang_evicpress.tiers.entry.identity import FORMAT_VERSION
from sglang_evicpress.tiers.entry.key import SEAL_BYTES, Key
from sglang_evicpress.tiers.external.circuit import Circuit
from sglang_evicpress.tiers.external.values import Values

PART_BYTES = MOST_VALUE_BYTES = 4 << 20
MOST_PARTS = 1 << 12
LEVELS = ("exact", "lossy")
"""A reader prefers the first."""

BEGINS = (0, 64, 512)
"""Tokens that names are made of, in whole pages, at least one: of long ones first, so that contexts which only begin
alike do not stand in each other's way."""

NUM_PLACES = NUM_ATTEMPTS = 3

MISSING_S = 10.0
"""An entry of which a value is missing is passed over for so long: a store that was away, and not the value, has it
again."""

_MAGIC = b"EVPINDEX"
_INDEX = Struct("<8sHHIQI16s")  # magic, version, attempt, bytes of the header, of the payload and of a part, digest
INDEX_BYTES = _INDEX.size + 16  # and their xxh3-128
_MOST_BAD = 4096


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """An entry of the store: its header, the digest that its values are named by, and the bytes of each part."""

    header: Header
    digest: bytes
    part_bytes: int


class _Index(NamedTuple):
    """An index record: bytes of the header, of the payload and of a part, the digest, and the number of the attempt."""

    num_bytes: int
    payload_bytes: int
    part_bytes: int
    digest: bytes
    attempt: int


class _Standing(NamedTuple):
    """Finding of a name's places for an entry: the first of them that is ``free``, if any comes before one that has all
    of its tokens (``is_there``) or names its values, of which some are gone (``is_named``)."""

    free: str | None = None
    is_there: bool = False
    is_named: bool = False


def level_of(header: Header) -> str:
    """The one of LEVELS that an entry is kept under."""
    return LEVELS[0] if header.form.is_exact and not header.is_lossy_prefix else LEVELS[1]


class SharedEntries:
    """Entries in ``values``, sealed with ``key`` if there is one. Every call may take any time: for threads that nobody
    waits for without a deadline. Raises BadEntry for what must not be served and OSError for what the engine failed."""

    def __init__(
        self, values: Values, circuit: Circuit, key: Key | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._values, self._circuit, self._key, self._now_s = values, circuit, key, now_s
        self._bad: dict[bytes, float] = {}  # digests of entries that are not read, and until when, the newest last

    def publish(self, header: Header, chunks: Sequence[memoryview]) -> tuple[bool, bool]:
        """Keep an entry with the payload ``chunks``. Two flags: the store has all of its tokens now, at its level; that
        is by this call. Neither where every place of its names has something else. Raises BadEntry "full" where the
        store does not take it now."""
        seals = b""
        if self._key is not None:
            payload = (list(_cut(chunks, extent.offset, extent.num_bytes)) for extent in header.extents)
            seals = b"".join(map(self._key.seal_extent, payload))
        record = bytearray(encode(replace(header, payload_offset=0, seals=seals), self._key))
        num_bytes = header.payload_bytes
        attempts = [(_digest_of(record, attempt), attempt) for attempt in range(NUM_ATTEMPTS)]
        digest, attempt = next((each for each in attempts if self._bad.get(each[0]) != math.inf), (b"", 0))
        free, is_named = list[str](), False
        for name in self.names(header.parent_key, header.tokens, 4 * header.shape.page_size):
            standing = self._standing(f"{name}-{level_of(header)}", header.tokens, header.start, digest)
            if standing.is_there:
                return True, False
            is_named |= standing.is_named
            free += [] if standing.free is None else [standing.free]
        is_small = len(record) <= MOST_VALUE_BYTES and num_bytes <= PART_BYTES * MOST_PARTS
        if not digest or not is_small or not (free or is_named):
            return False, False
        for number, begin in enumerate(range(0, num_bytes, PART_BYTES)):
            part = list(_cut(chunks, begin, min(PART_BYTES, num_bytes - begin)))
            self._put(_part_name(digest, number), part[0] if len(part) == 1 else memoryview(bytearray().join(part)))
        index = bytearray(_INDEX.pack(_MAGIC, FORMAT_VERSION, attempt, len(record), num_bytes, PART_BYTES, digest))
        index += xxhash.xxh3_128_digest(index)
        self._put(_header_name(digest), memoryview(record))
        for place in free:
            self._put(place, memoryview(index))
        self._bad.pop(digest, None)  # what was missing is there again
        return True, True

    def has_all(self, parent_key: bytes, tokens: bytes, start: int, page_bytes: int, level: str) -> bool:
        """True if the store has these tokens behind that path, from position ``start`` on, at that level: as far as can
        be told without reading all of an entry."""
        names = self.names(parent_key, tokens, page_bytes)
        return any(self._standing(f"{name}-{level}", tokens, start, b"").is_there for name in names)

    def names(self, parent_key: bytes, tokens: bytes, page_bytes: int) -> Iterator[str]:
        """Names of what continues the path ``parent_key`` with these tokens (little-endian uint32), the longest first;
        with a key none that others could make."""
        for begin in reversed(BEGINS):
            num_bytes = max(1, -(-4 * begin // page_bytes)) * page_bytes
            if num_bytes <= len(tokens):
                named = sha256(b"evicpress external\0" + parent_key + tokens[:num_bytes]).digest()
                yield (named if self._key is None else named[:4] + self._key.seal_record(named)).hex()[:40]

    def find(self, name: str, tokens: bytes, levels: Sequence[str] = LEVELS) -> FoundEntry | None:
        """The entry of that name that shares most with ``tokens``, of the first of these levels that has one. Its
        payload may be gone or damaged. Raises BadEntry where all that stands there is unusable."""
        best, most, problem = None, 0, None
        for level in levels:
            for place in range(NUM_PLACES):
                try:
                    found = self._found_at(f"{name}-{level}-{place}")
                except BadEntry as error:
                    problem = error
                    continue
                if found is None:
                    break
                num_shared = _shared_bytes(found.header.tokens, tokens)
                if num_shared > most:
                    best, most = found, num_shared
            if best is not None:
                return best
        if problem is not None:
            raise problem
        return None

    def read(self, found: FoundEntry, chunks: Sequence[memoryview]) -> None:
        """Fill the chunks with its payload, and check every extent."""
        header, size = found.header, found.part_bytes
        try:
            for number, begin in enumerate(range(0, header.payload_bytes, size)):
                targets = list(_cut(chunks, begin, min(size, header.payload_bytes - begin)))
                whole = targets[0] if len(targets) == 1 else memoryview(bytearray(sum(map(len, targets))))
                if not self._get(_part_name(found.digest, number), whole):
                    raise BadEntry("missing", f"part {number} of its payload is gone")
                if len(targets) > 1:
                    for target in targets:
                        target[:], whole = whole[: len(target)], whole[len(target) :]
            for number, extent in enumerate(header.extents):
                seal = header.seals[number * SEAL_BYTES : (number + 1) * SEAL_BYTES]
                part = _cut(chunks, extent.offset, extent.num_bytes)
                check_part(header, number, part, None if self._key is None else (self._key, seal))
        except BadEntry as error:
            if error.reason != "deadline":  # which tells of the store
                self.pass_over(found.digest, MISSING_S if error.reason == "missing" else math.inf)
            raise

    def pass_over(self, digest: bytes, seconds: float = math.inf) -> None:
        """Do not take the entry for one for so long: its values stay as they are."""
        self._bad.pop(digest, None)
        self._bad[digest] = self._now_s() + seconds
        if len(self._bad) > _MOST_BAD:
            self._bad.pop(next(iter(self._bad)))

    def close(self) -> None:
        self._values.close()

    def _standing(self, name: str, tokens: bytes, start: int, digest: bytes) -> _Standing:
        """Find whether the places of a name have all of these tokens, with the first and the last part of the payload,
        or an index of the entry whose values are named by ``digest``."""
        for number in range(NUM_PLACES):
            place = f"{name}-{number}"
            is_named = False
            try:
                index = self._index(place)
                if index is None:
                    return _Standing(free=place)
                is_named = index.digest == digest
                found = self._entry_of(index)
                last = max(0, index.payload_bytes - 1) // index.part_bytes
                is_there = found.header.tokens.startswith(tokens) and found.header.start == start
                if is_there and all(self._has(_part_name(index.digest, part)) for part in {0, last}):
                    return _Standing(is_there=True)
            except BadEntry as error:
                if error.reason == "deadline":
                    raise
            if is_named:
                return _Standing(is_named=True)
        return _Standing()

    def _found_at(self, place: str) -> FoundEntry | None:
        """Entry at a place; None if it is free. Raises BadEntry for what is dead, damaged or another's."""
        index = self._index(place)
        return None if index is None else self._entry_of(index)

    def _entry_of(self, index: _Index) -> FoundEntry:
        """The entry that an index names. Raises BadEntry as ``_found_at``."""
        digest = index.digest
        if self._bad.get(digest, -math.inf) > self._now_s():
            raise BadEntry("missing", "it was of no use before")
        record = bytearray(index.num_bytes)
        if not self._get(_header_name(digest), memoryview(record)):
            raise BadEntry("missing", "its header is gone")
        try:
            if _digest_of(record, index.attempt) != digest:
                raise BadEntry("header", "its header is not the one that its index names")
            header, _ = decode(record, key=self._key)
            if header.payload_bytes != index.payload_bytes:
                raise BadEntry("length", "its index names another size")
        except BadEntry:
            self.pass_over(digest)
            raise
        return FoundEntry(header, digest, index.part_bytes)

    def _index(self, place: str) -> _Index | None:
        """The index at a place, None without one. Raises BadEntry for one that cannot be used."""
        record = bytearray(INDEX_BYTES)
        if not self._get(place, memoryview(record)):
            return None
        magic, version, attempt, num_bytes, payload_bytes, part_bytes, digest = _INDEX.unpack_from(record)
        is_whole = xxhash.xxh3_128_digest(record[: _INDEX.size]) == bytes(record[_INDEX.size :])
        if not is_whole or magic != _MAGIC or attempt >= NUM_ATTEMPTS:
            raise BadEntry("checksum", "its index is damaged")
        if version != FORMAT_VERSION:
            raise BadEntry("version", f"it is of format {version}: expected {FORMAT_VERSION}")
        index = _Index(num_bytes, payload_bytes, part_bytes, digest, attempt)
        are_sizes_good = 0 < index.num_bytes <= MOST_VALUE_BYTES and 0 < index.part_bytes <= MOST_VALUE_BYTES
        if not are_sizes_good or index.payload_bytes > index.part_bytes * MOST_PARTS:
            raise BadEntry("length", "its index names sizes that no entry has")
        return index

    def _has(self, key: str) -> bool:
        with self._circuit.call("read", 0):
            return self._values.has(key)

    def _get(self, key: str, target: memoryview) -> bool:
        with self._circuit.call("read", len(target)):
            return self._values.get(key, target)

    def _put(self, key: str, value: memoryview) -> None:
        """Raises BadEntry "full" where the store does not take it."""
        with self._circuit.call("write", len(value)):
            is_kept = self._values.put(key, value)
        if not is_kept:
            self._circuit.fail("write", f"it took no {len(value)} bytes")
            raise BadEntry("full", f"the store took no {len(value)} bytes")


def _digest_of(record: bytes | bytearray, attempt: int) -> bytes:
    """Digest of a header's record, by which the values of an entry are named, of its first attempt that itself."""
    return xxhash.xxh3_128_digest(bytes(record) + bytes([attempt]) if attempt else record)


def _header_name(digest: bytes) -> str:
    return f"{digest.hex()}-header"


def _part_name(digest: bytes, number: int) -> str:
    return f"{digest.hex()}-{number}"


def _shared_bytes(left: bytes, right: bytes) -> int:
    """Number of leading bytes that two rows share, in whole tokens: by halving, as rows are long and mostly alike."""
    low, high = 0, min(len(left), len(right)) // 4
    if left[: 4 * high] == right[: 4 * high]:
        return 4 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[: 4 * middle] == right[: 4 * middle] else (low, middle)
    return 4 * low


def _cut(chunks: Sequence[memoryview], offset: int, num_bytes: int) -> Iterator[memoryview]:
    """The bytes [offset, offset + num_bytes) of the chunks one after the other."""
    for chunk in chunks:
        piece = chunk[offset : offset + num_bytes] if offset < len(chunk) else chunk[:0]
        offset = max(0, offset - len(chunk))
        num_bytes -= len(piece)
        if len(piece):
            yield piece
        if not num_bytes:
            return
