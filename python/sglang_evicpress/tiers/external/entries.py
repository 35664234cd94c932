"""Entries as values of an external store, which knows neither sizes nor ranges, and may lose any of them alone.

An entry is found under names that follow from what comes before it, the path's key, and its first tokens: a page of
them, 64 and 512. The value there, an index record, names the values of the entry itself by the digest of its header, so
that values of two writers never mix: the header, and its payload in parts. The index comes last. A name has a few
places, tried in turn: no value is ever replaced, and what stands in one may be another continuation, or dead. Exact KV
and lossy KV are kept apart. Whatever is missing, damaged or of another size is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from struct import Struct

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

NUM_PLACES = 3

_MAGIC = b"EVPINDEX"
_INDEX = Struct("<8sHHIQI16s")  # magic, version, zero, bytes of the header, of the payload and of a part, digest
INDEX_BYTES = _INDEX.size + 16  # and their xxh3-128
_MOST_BAD = 4096


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """An entry of the store: its header, the digest that its values are named by, and the bytes of each part."""

    header: Header
    digest: bytes
    part_bytes: int


def level_of(header: Header) -> str:
    """The one of LEVELS that an entry is kept under."""
    return LEVELS[0] if header.form.is_exact and not header.is_lossy_prefix else LEVELS[1]


class SharedEntries:
    """Entries in ``values``, sealed with ``key`` if there is one. Every call may take any time: for threads that nobody
    waits for without a deadline. Raises BadEntry for what must not be served and OSError for what the engine failed."""

    def __init__(self, values: Values, circuit: Circuit, key: Key | None = None) -> None:
        self._values, self._circuit, self._key = values, circuit, key
        self._bad: dict[bytes, None] = {}  # digests of entries that are not read again, the newest last

    def publish(self, header: Header, chunks: Sequence[memoryview]) -> tuple[bool, bool]:
        """Keep an entry with the payload ``chunks``. Two flags: the store has all of its tokens now, at its level; that
        is by this call. Not where there is no room, or every place of its names has something else."""
        seals = b""
        if self._key is not None:
            payload = (list(_cut(chunks, extent.offset, extent.num_bytes)) for extent in header.extents)
            seals = b"".join(map(self._key.seal_extent, payload))
        free, page_bytes = list[str](), 4 * header.shape.page_size
        for name in self.names(header.parent_key, header.tokens, page_bytes):
            place, is_there = self._free_place(f"{name}-{level_of(header)}", header)
            if is_there:
                return True, False
            free += [] if place is None else [place]
        record = bytearray(encode(replace(header, payload_offset=0, seals=seals), self._key))
        num_bytes = header.payload_bytes
        if not free or len(record) > MOST_VALUE_BYTES or num_bytes > PART_BYTES * MOST_PARTS:
            return False, False
        digest = xxhash.xxh3_128_digest(record)
        for number, begin in enumerate(range(0, num_bytes, PART_BYTES)):
            part = list(_cut(chunks, begin, min(PART_BYTES, num_bytes - begin)))
            value = part[0] if len(part) == 1 else memoryview(bytearray().join(part))
            if not self._put(_part_name(digest, number), value):
                return False, False
        index = bytearray(_INDEX.pack(_MAGIC, FORMAT_VERSION, 0, len(record), num_bytes, PART_BYTES, digest))
        index += xxhash.xxh3_128_digest(index)
        is_kept = self._put(_header_name(digest), memoryview(record))
        is_kept = is_kept and all(self._put(place, memoryview(index)) for place in free)
        return is_kept, is_kept

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
        except BadEntry:
            self.pass_over(found.digest)
            raise

    def pass_over(self, digest: bytes) -> None:
        """Do not take the entry for one any more: its values stay as they are."""
        self._bad[digest] = None
        if len(self._bad) > _MOST_BAD:
            self._bad.pop(next(iter(self._bad)))

    def close(self) -> None:
        self._values.close()

    def _free_place(self, name: str, header: Header) -> tuple[str | None, bool]:
        """The first place of a name that is free, None if there is none; and whether one has all of the entry's tokens,
        with the first and the last part of its payload."""
        for number in range(NUM_PLACES):
            place = f"{name}-{number}"
            try:
                found = self._found_at(place)
            except BadEntry:
                continue
            if found is None:
                return place, False
            last = max(0, found.header.payload_bytes - 1) // found.part_bytes
            is_there = found.header.tokens.startswith(header.tokens) and found.header.start == header.start
            if is_there and all(self._has(_part_name(found.digest, part)) for part in {0, last}):
                return None, True
        return None, False

    def _found_at(self, place: str) -> FoundEntry | None:
        """Entry at a place; None if it is free. Raises BadEntry for what is dead, damaged or another's."""
        index = self._index(place)
        if index is None:
            return None
        num_bytes, payload_bytes, part_bytes, digest = index
        if digest in self._bad:
            raise BadEntry("missing", "it was of no use before")
        record = bytearray(num_bytes)
        if not self._get(_header_name(digest), memoryview(record)):
            raise BadEntry("missing", "its header is gone")
        try:
            if xxhash.xxh3_128_digest(record) != digest:
                raise BadEntry("header", "its header is not the one that its index names")
            header, _ = decode(record, key=self._key)
            if header.payload_bytes != payload_bytes:
                raise BadEntry("length", "its index names another size")
        except BadEntry:
            self.pass_over(digest)
            raise
        return FoundEntry(header, digest, part_bytes)

    def _index(self, place: str) -> tuple[int, int, int, bytes] | None:
        """Bytes of the header, of the payload and of a part, and the digest; None without an index. Raises BadEntry."""
        record = bytearray(INDEX_BYTES)
        if not self._get(place, memoryview(record)):
            return None
        magic, version, zero, num_bytes, payload_bytes, part_bytes, digest = _INDEX.unpack_from(record)
        if xxhash.xxh3_128_digest(record[: _INDEX.size]) != bytes(record[_INDEX.size :]) or magic != _MAGIC or zero:
            raise BadEntry("checksum", "its index is damaged")
        if version != FORMAT_VERSION:
            raise BadEntry("version", f"it is of format {version}: expected {FORMAT_VERSION}")
        are_sizes_good = 0 < num_bytes <= MOST_VALUE_BYTES and 0 < part_bytes <= MOST_VALUE_BYTES
        if not are_sizes_good or payload_bytes > part_bytes * MOST_PARTS:
            raise BadEntry("length", "its index names sizes that no entry has")
        return num_bytes, payload_bytes, part_bytes, digest

    def _has(self, key: str) -> bool:
        with self._circuit.call("read", 0):
            return self._values.has(key)

    def _get(self, key: str, target: memoryview) -> bool:
        with self._circuit.call("read", len(target)):
            return self._values.get(key, target)

    def _put(self, key: str, value: memoryview) -> bool:
        with self._circuit.call("write", len(value)):
            is_kept = self._values.put(key, value)
        if not is_kept:
            self._circuit.fail("write", f"it took no {len(value)} bytes")
        return is_kept


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
