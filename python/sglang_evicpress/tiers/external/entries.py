"""Entries as values of an external store, which knows neither sizes nor ranges, and may lose any of them alone.

An entry is found under a name that follows from what comes before it: the path's key and the first page of its tokens,
exact KV and lossy KV apart. The value there, an index record, names the values of the entry itself by the digest of
its header, so that values of two writers never mix: the header, and its payload in parts of ``part_bytes``. The index
comes last. Whatever is missing, damaged or of another size is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from struct import Struct

import xxhash

from sglang_evicpress.tiers.entry.encoding import MAX_RECORD_BYTES, decode, encode
from sglang_evicpress.tiers.entry.header import BadEntry, Header, check_part
from sglang_evicpress.tiers.entry.identity import FORMAT_VERSION
from sglang_evicpress.tiers.entry.key import SEAL_BYTES, Key
from sglang_evicpress.tiers.external.circuit import Circuit
from sglang_evicpress.tiers.external.values import Values

PART_BYTES = 4 << 20
MOST_PARTS = 1 << 12
LEVELS = ("exact", "lossy")
"""What may be kept under one name each; a reader prefers the first."""

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


def name_of(parent_key: bytes, first_page: bytes) -> str:
    """Name of what continues the path ``parent_key`` with that page of tokens (little-endian uint32)."""
    return sha256(b"evicpress external\0" + parent_key + first_page).hexdigest()[:40]


class SharedEntries:
    """Entries in ``values``, sealed with ``key`` if there is one. Every call may take any time: for threads that nobody
    waits for without a deadline. Raises BadEntry for what must not be served and OSError for what the engine failed."""

    def __init__(self, values: Values, circuit: Circuit, key: Key | None = None) -> None:
        self._values, self._circuit, self._key = values, circuit, key
        self._bad: dict[bytes, None] = {}  # digests of entries that were found damaged, the newest last

    def publish(self, header: Header, chunks: Sequence[memoryview]) -> bool:
        """Keep an entry with the payload ``chunks``. False where another has it already, or there is no room."""
        index_name = _index_name(header)
        if self._index(index_name) is not None:
            return False
        seals = b""
        if self._key is not None:
            payload = (list(_cut(chunks, extent.offset, extent.num_bytes)) for extent in header.extents)
            seals = b"".join(map(self._key.seal_extent, payload))
        record = bytearray(encode(replace(header, payload_offset=0, seals=seals), self._key))
        digest = xxhash.xxh3_128_digest(record)
        payload_bytes = header.payload_bytes
        index = bytearray(_INDEX.pack(_MAGIC, FORMAT_VERSION, 0, len(record), payload_bytes, PART_BYTES, digest))
        for number, begin in enumerate(range(0, payload_bytes, PART_BYTES)):
            part = list(_cut(chunks, begin, min(PART_BYTES, payload_bytes - begin)))
            value = part[0] if len(part) == 1 else memoryview(bytearray().join(part))
            if not self._put(_part_name(digest, number), value):
                return False
        index += xxhash.xxh3_128_digest(index)
        return self._put(_header_name(digest), memoryview(record)) and self._put(index_name, memoryview(index))

    def find(self, name: str, levels: Sequence[str] = LEVELS) -> FoundEntry | None:
        """The entry of that name, of the first of these levels that has one. Its payload may be gone or damaged."""
        for level in levels:
            index = self._index(f"{name}-{level}")
            if index is None:
                continue
            num_bytes, payload_bytes, part_bytes, digest = index
            if digest in self._bad:
                continue
            record = bytearray(num_bytes)
            if not self._get(_header_name(digest), memoryview(record)):
                continue
            if xxhash.xxh3_128_digest(record) != digest:
                self._note_bad(digest)
                raise BadEntry("header", "its header is not the one that its index names")
            header, _ = decode(record, key=self._key)
            if header.payload_bytes != payload_bytes:
                raise BadEntry("length", "its index names another size")
            return FoundEntry(header, digest, part_bytes)
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
            self._note_bad(found.digest)
            raise

    def close(self) -> None:
        self._values.close()

    def _index(self, name: str) -> tuple[int, int, int, bytes] | None:
        """Bytes of the header, of the payload and of a part, and the digest; None without an index. Raises BadEntry."""
        record = bytearray(INDEX_BYTES)
        if not self._get(name, memoryview(record)):
            return None
        magic, version, zero, num_bytes, payload_bytes, part_bytes, digest = _INDEX.unpack_from(record)
        if xxhash.xxh3_128_digest(record[: _INDEX.size]) != bytes(record[_INDEX.size :]) or magic != _MAGIC or zero:
            raise BadEntry("checksum", "its index is damaged")
        if version != FORMAT_VERSION:
            raise BadEntry("version", f"it is of format {version}: expected {FORMAT_VERSION}")
        if not (0 < num_bytes <= MAX_RECORD_BYTES and part_bytes > 0 and payload_bytes <= part_bytes * MOST_PARTS):
            raise BadEntry("length", "its index names sizes that no entry has")
        return num_bytes, payload_bytes, part_bytes, digest

    def _note_bad(self, digest: bytes) -> None:
        """Do not read the entry again: its values stay as they are."""
        self._bad[digest] = None
        if len(self._bad) > _MOST_BAD:
            self._bad.pop(next(iter(self._bad)))

    def _get(self, key: str, target: memoryview) -> bool:
        with self._circuit.call("read", len(target)):
            return self._values.get(key, target)

    def _put(self, key: str, value: memoryview) -> bool:
        with self._circuit.call("write", len(value)):
            is_kept = self._values.put(key, value)
        if not is_kept:
            self._circuit.fail("write", f"it took no {len(value)} bytes")
        return is_kept


def _index_name(header: Header) -> str:
    page = header.tokens[: 4 * header.shape.page_size]
    return f"{name_of(header.parent_key, page)}-{level_of(header)}"


def _header_name(digest: bytes) -> str:
    return f"{digest.hex()}-header"


def _part_name(digest: bytes, number: int) -> str:
    return f"{digest.hex()}-{number}"


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
