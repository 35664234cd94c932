"""The record of an entry's header: what lies on disk, found again by scanning, and read from untrusted bytes.

A record is self-delimiting, little-endian and without padding::

    magic, version, kind, length | fixed fields | extents | tokens | dtype, form | slots by layer | xxh3-128 of all
    before it

Slots by layer, a number for each, are there where the flag says so. The first 16 bytes mean the same in every version.
A tombstone is a record of another kind: its body is one number. With a key the kind has one more bit, behind those are
the seals of the extents, and at the end is the seal of all before it: a record without a seal of the same key is
intact, and another's.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np
import xxhash

from sglang_evicpress.tiers.entry.header import (
    EXTENT,
    MAX_OFFSET,
    BadEntry,
    ExtentTable,
    Header,
    Shape,
    form_text,
    parse_form,
    problem_of,
)
from sglang_evicpress.tiers.entry.identity import FORMAT_VERSION, MAX_LOOKUP_KEY
from sglang_evicpress.tiers.entry.key import SEAL_BYTES, Buffer, Key

MAGIC = b"EVPENTRY"
MAX_RECORD_BYTES = 64 << 20

_ENTRY, _TOMBSTONE = 1, 2
_SEALED = 0x100  # of the kind
_CHECKSUM_BYTES = 16
_PREFIX = Struct("<8sHHI")  # magic, version, kind, length of the whole record in bytes
# fingerprint, namespace, parent key, key, lookup key, start, payload offset and bytes, numbers of tokens, slots,
# extents, layers and heads, head_dim, page_size, bytes of dtype and form, flags
_FIXED = Struct("<16s16s16s16sQQQQIIIIIIIBBH")
_PEEKED = Struct("<16s32x16sQ8xQQI")
_NUMBER = Struct("<Q")
_IS_LOSSY_PREFIX, _HAS_LAYER_SLOTS = 1, 2  # of the flags


class Peek(NamedTuple):
    """Fields of an entry's record that a start-up scan needs."""

    fingerprint: bytes
    lookup_key: int
    num_tokens: int
    payload_offset: int
    payload_bytes: int
    record_bytes: int
    key: bytes
    is_ours: bool = True  # sealed with our key, or with none where we have none


class Tombstone(NamedTuple):
    """A record that says: the record at byte ``number`` of this file is dead."""

    number: int
    record_bytes: int
    is_ours: bool = True


def encode(header: Header, key: Key | None = None) -> bytes:
    """The header's record, sealed with the key. Raises ValueError for a header that ``decode`` would not accept."""
    num_seals = 0 if key is None else len(header.extents)
    if len(header.seals) != SEAL_BYTES * num_seals:
        raise ValueError(f"header has {len(header.seals)} bytes of seals: expected {SEAL_BYTES * num_seals}")
    if problem := problem_of(header):
        raise ValueError(f"header cannot be written: {problem}")
    shape, dtype, form = header.shape, header.shape.dtype.encode("ascii"), form_text(header.form).encode("ascii")
    fixed = _FIXED.pack(
        header.fingerprint,
        header.namespace,
        header.parent_key,
        header.key,
        header.lookup_key,
        header.start,
        header.payload_offset,
        header.payload_bytes,
        header.num_tokens,
        header.num_slots,
        len(header.extents),
        shape.num_layers,
        shape.num_heads,
        shape.head_dim,
        shape.page_size,
        len(dtype),
        len(form),
        _IS_LOSSY_PREFIX * header.is_lossy_prefix + _HAS_LAYER_SLOTS * bool(header.layer_slots),
    )
    layer_slots = np.array(header.layer_slots, "<u4").tobytes()
    extents = ExtentTable.of(header.extents).packed
    return _seal(_ENTRY, fixed + extents + header.tokens + dtype + form + layer_slots + header.seals, key)


def encode_tombstone(number: int, key: Key | None = None) -> bytes:
    """The record that says: the record at byte ``number`` of this file is dead."""
    if not 0 <= number <= MAX_OFFSET:
        raise ValueError(f"tombstone for byte {number}: expected 0 to {MAX_OFFSET}")
    return _seal(_TOMBSTONE, _NUMBER.pack(number), key)


def decode(buffer: Buffer, offset: int = 0, key: Key | None = None) -> tuple[Header, int]:
    """The header at ``offset`` and the offset behind it. Whatever the bytes are, it raises nothing but BadEntry.

    Its reason is "magic", "version", "length" (it does not end within the buffer), "header" (it is damaged, or says
    what cannot be, or is no entry's) or "key" (it is not sealed with the key, or it is and there is no key).
    """
    kind, record, tail_bytes = _open(buffer, offset)
    if kind != _ENTRY or len(record) < _PREFIX.size + _FIXED.size + tail_bytes:
        raise BadEntry("header", f"record of kind {kind} is not an entry's")
    if not _is_ours(record, tail_bytes, key):
        raise BadEntry("key", "it is not sealed with the key" if key is not None else "it is sealed with a key")
    (
        fingerprint,
        namespace,
        parent_key,
        path_key,
        lookup_key,
        start,
        payload_offset,
        payload_bytes,
        num_tokens,
        num_slots,
        num_extents,
        num_layers,
        num_heads,
        head_dim,
        page_size,
        dtype_bytes,
        form_bytes,
        flags,
    ) = _FIXED.unpack_from(record, _PREFIX.size)
    extents_at = _PREFIX.size + _FIXED.size
    tokens_at = extents_at + num_extents * EXTENT.size
    dtype_at = tokens_at + 4 * num_tokens
    form_at = dtype_at + dtype_bytes
    layer_slots_at = form_at + form_bytes
    seals_at = layer_slots_at + (4 * num_layers if flags & _HAS_LAYER_SLOTS else 0)
    seals_bytes = 0 if key is None else SEAL_BYTES * num_extents
    if seals_at + seals_bytes + tail_bytes != len(record) or flags > 3:
        raise BadEntry("header", "its parts do not add up to its length")
    try:
        dtype = str(record[dtype_at:form_at], "ascii")
        form = parse_form(str(record[form_at:layer_slots_at], "ascii"))
    except ValueError as error:
        raise BadEntry("header", str(error)) from None
    header = Header(
        fingerprint,
        namespace,
        parent_key,
        path_key,
        start,
        bytes(record[tokens_at:dtype_at]),
        form,
        bool(flags & _IS_LOSSY_PREFIX),
        num_slots,
        Shape(num_layers, num_heads, head_dim, dtype, page_size),
        ExtentTable(bytes(record[extents_at:tokens_at])),
        payload_offset,
        bytes(record[seals_at : seals_at + seals_bytes]),
        tuple(np.frombuffer(record[layer_slots_at:seals_at], "<u4").tolist()),
    )
    if problem := problem_of(header):
        raise BadEntry("header", problem)
    if (header.lookup_key, header.payload_bytes) != (lookup_key, payload_bytes):
        raise BadEntry("header", "its lookup key or payload size is not that of its tokens and extents")
    return header, offset + len(record)


def peek(buffer: Buffer, offset: int = 0, key: Key | None = None) -> Peek | Tombstone:
    """The record at ``offset``, undamaged, but what it says is not checked further. Raises BadEntry as ``decode``, but
    for "key": one that is not ours says so."""
    kind, record, tail_bytes = _open(buffer, offset)
    is_ours = _is_ours(record, tail_bytes, key)
    if kind == _ENTRY and len(record) >= _PREFIX.size + _FIXED.size + tail_bytes:
        fingerprint, path_key, lookup_key, at, num_bytes, num_tokens = _PEEKED.unpack_from(record, _PREFIX.size)
        if lookup_key <= MAX_LOOKUP_KEY and at + num_bytes <= MAX_OFFSET:
            return Peek(fingerprint, lookup_key, num_tokens, at, num_bytes, len(record), path_key, is_ours)
    elif kind == _TOMBSTONE and len(record) == _PREFIX.size + _NUMBER.size + tail_bytes:
        (number,) = _NUMBER.unpack_from(record, _PREFIX.size)
        if number <= MAX_OFFSET:
            return Tombstone(number, len(record), is_ours)
    raise BadEntry("header", f"record of kind {kind} says what cannot be")


def _seal(kind: int, body: bytes, key: Key | None) -> bytes:
    if key is not None:
        kind |= _SEALED
    length = _PREFIX.size + len(body) + _tail_bytes(kind)
    if length > MAX_RECORD_BYTES:
        raise ValueError(f"record has {length} bytes: expected at most {MAX_RECORD_BYTES}")
    record = _PREFIX.pack(MAGIC, FORMAT_VERSION, kind, length) + body
    record += xxhash.xxh3_128_digest(record)
    return record if key is None else record + key.seal_record(record)


def _tail_bytes(kind: int) -> int:
    return _CHECKSUM_BYTES + (SEAL_BYTES if kind & _SEALED else 0)


def _is_ours(record: memoryview, tail_bytes: int, key: Key | None) -> bool:
    is_sealed = tail_bytes > _CHECKSUM_BYTES
    if key is None or not is_sealed:
        return not is_sealed and key is None
    return key.is_record(record[:-SEAL_BYTES], record[-SEAL_BYTES:])


def _open(buffer: Buffer, offset: int) -> tuple[int, memoryview, int]:
    """Kind and bytes of the undamaged record at ``offset``, and how many of them are checksum and seal."""
    view = memoryview(buffer)
    if view.format != "B":
        view = view.cast("B")
    if not 0 <= offset <= len(view) - _PREFIX.size:
        raise BadEntry("length", f"no record begins at byte {offset} of {len(view)}")
    magic, version, kind, length = _PREFIX.unpack_from(view, offset)
    if magic != MAGIC:
        raise BadEntry("magic", f"byte {offset} does not begin a record")
    if version != FORMAT_VERSION:
        raise BadEntry("version", f"it is of format {version}: expected {FORMAT_VERSION}")
    end, tail_bytes = offset + length, _tail_bytes(kind)
    if not _PREFIX.size + _CHECKSUM_BYTES <= length <= MAX_RECORD_BYTES or end > len(view):
        raise BadEntry("length", f"it says {length} bytes, and {len(view) - offset} are there")
    sum_at = end - tail_bytes
    if (
        sum_at < offset + _PREFIX.size
        or xxhash.xxh3_128_digest(view[offset:sum_at]) != view[sum_at : sum_at + _CHECKSUM_BYTES]
    ):
        raise BadEntry("header", "its checksum does not hold")
    return kind & ~_SEALED, view[offset:end], tail_bytes
