"""The record that describes one entry (one radix-tree node in one form) and proves its payload.

A record is self-delimiting, little-endian and without padding::

    magic, version, kind, length | fixed fields | extents | tokens | dtype, form | xxh3-128 of all before it

The first 16 bytes mean the same in every version. A tombstone is a record of another kind: the fixed fields are one
number. The payload itself is, for each layer, K rows [num_slots, num_heads, head_dim] then V rows, and, where a press
dropped tokens, positions int32 [num_layers, num_heads, num_slots] then logical int32 [num_slots]; it has no gaps.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np
import xxhash

from sglang_evicpress.core import Form
from sglang_evicpress.tiers.identity import FORMAT_VERSION as FORMAT_VERSION
from sglang_evicpress.tiers.identity import KEY_BYTES, MAX_EDGE, edge_of

Buffer = bytes | bytearray | memoryview | mmap.mmap

MAGIC = b"EVPENTRY"
MAX_RECORD_BYTES = 64 << 20
REASONS = (
    "magic",
    "version",
    "header",
    "fingerprint",
    "namespace",
    "identity",
    "length",
    "checksum",
    "io",
    "missing",
    "deadline",
    "full",
)
ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}

_ENTRY, _TOMBSTONE = 1, 2
_CHECKSUM_BYTES = 16
_MAX_OFFSET = 2**63 - 1
_MAX_POSITION = 2**31 - 1  # positions are int32
_PREFIX = Struct("<8sHHI")  # magic, version, kind, length of the whole record in bytes
# fingerprint, namespace, parent key, key, edge, start, payload offset and bytes, numbers of tokens, slots, extents,
# layers and heads, head_dim, page_size, bytes of dtype and form, flags
_FIXED = Struct("<16s16s16s16sQQQQIIIIIIIBBH")
_PEEKED = Struct("<16s32x16sQ8xQQI")
_NUMBER = Struct("<Q")
_EXTENT = Struct("<QQ16s")
_CODEC = re.compile(r"[0-9A-Za-z_.-]{1,32}")


class BadEntry(Exception):
    """An entry that must not be served; ``reason`` is one of REASONS, under which the miss is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in REASONS:
            raise ValueError(f"reason {reason!r} is not known: expected one of {', '.join(REASONS)}")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Extent:
    """``num_bytes`` of the payload from ``offset`` on, and their xxh3-128 digest (16 bytes)."""

    offset: int
    num_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of one rank; ``dtype`` is torch's name without ``torch.``, one of ITEM_BYTES."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    page_size: int

    def layer_bytes(self, num_slots: int) -> int:
        """K and V of one layer, as they are in the pool."""
        return 2 * num_slots * self.num_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def survivors_bytes(self, num_slots: int) -> int:
        """Positions and logical indices of the tokens that a press kept."""
        return 4 * num_slots * (self.num_layers * self.num_heads + 1)


@dataclass(frozen=True, slots=True)
class Header:
    """What one entry is. ``start`` is the absolute position of its first token, ``tokens`` are little-endian uint32.

    ``parent_key`` and ``key`` are the path's hash at its start and at its end. ``is_lossy_prefix`` says that its KV
    was computed behind a lossy prefix. There is one extent per layer, and one more for a press's survivors;
    ``payload_offset`` is where the payload begins in whatever file holds it.
    """

    fingerprint: bytes
    namespace: bytes
    parent_key: bytes
    key: bytes
    start: int
    tokens: bytes
    form: Form
    is_lossy_prefix: bool
    num_slots: int
    shape: Shape
    extents: tuple[Extent, ...]
    payload_offset: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def payload_bytes(self) -> int:
        return self.extents[-1].offset + self.extents[-1].num_bytes if self.extents else 0

    @property
    def edge(self) -> int:
        """The number under which it is looked up: see ``edge_of``."""
        return edge_of(self.parent_key, np.frombuffer(self.tokens[: 4 * self.shape.page_size], "<u4"))


class Peek(NamedTuple):
    """What a start-up scan needs of an entry's record."""

    fingerprint: bytes
    edge: int
    num_tokens: int
    payload_offset: int
    payload_bytes: int
    record_bytes: int
    key: bytes


class Tombstone(NamedTuple):
    """A record that says: the record at byte ``number`` of this file is dead."""

    number: int
    record_bytes: int


def encode(header: Header) -> bytes:
    """The header's record. Raises ValueError for a header that ``decode`` would not accept."""
    if problem := _problem(header):
        raise ValueError(f"header cannot be written: {problem}")
    shape, dtype, form = header.shape, header.shape.dtype.encode("ascii"), _form_text(header.form).encode("ascii")
    fixed = _FIXED.pack(
        header.fingerprint,
        header.namespace,
        header.parent_key,
        header.key,
        header.edge,
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
        header.is_lossy_prefix,
    )
    extents = b"".join(_EXTENT.pack(extent.offset, extent.num_bytes, extent.digest) for extent in header.extents)
    return _seal(_ENTRY, fixed + extents + header.tokens + dtype + form)


def encode_tombstone(number: int) -> bytes:
    """The record that says: the record at byte ``number`` of this file is dead."""
    if not 0 <= number <= _MAX_OFFSET:
        raise ValueError(f"tombstone for byte {number}: expected 0 to {_MAX_OFFSET}")
    return _seal(_TOMBSTONE, _NUMBER.pack(number))


def decode(buffer: Buffer, offset: int = 0) -> tuple[Header, int]:
    """The header at ``offset`` and the offset behind it. Whatever the bytes are, it raises nothing but BadEntry.

    Its reason is "magic", "version", "length" (it does not end within the buffer) or "header" (it is damaged, or says
    what cannot be, or is no entry's).
    """
    kind, record = _open(buffer, offset)
    if kind != _ENTRY or len(record) < _PREFIX.size + _FIXED.size + _CHECKSUM_BYTES:
        raise BadEntry("header", f"record of kind {kind} is not an entry's")
    (
        fingerprint,
        namespace,
        parent_key,
        key,
        edge,
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
    tokens_at = extents_at + num_extents * _EXTENT.size
    dtype_at = tokens_at + 4 * num_tokens
    form_at = dtype_at + dtype_bytes
    if form_at + form_bytes + _CHECKSUM_BYTES != len(record) or flags > 1:
        raise BadEntry("header", "its parts do not add up to its length")
    try:
        dtype = str(record[dtype_at:form_at], "ascii")
        form = _parse_form(str(record[form_at : form_at + form_bytes], "ascii"))
    except ValueError as error:
        raise BadEntry("header", str(error)) from None
    header = Header(
        fingerprint,
        namespace,
        parent_key,
        key,
        start,
        bytes(record[tokens_at:dtype_at]),
        form,
        bool(flags),
        num_slots,
        Shape(num_layers, num_heads, head_dim, dtype, page_size),
        tuple(Extent(*fields) for fields in _EXTENT.iter_unpack(record[extents_at:tokens_at])),
        payload_offset,
    )
    if problem := _problem(header):
        raise BadEntry("header", problem)
    if (header.edge, header.payload_bytes) != (edge, payload_bytes):
        raise BadEntry("header", "its edge or payload size is not that of its tokens and extents")
    return header, offset + len(record)


def peek(buffer: Buffer, offset: int = 0) -> Peek | Tombstone:
    """The record at ``offset``, undamaged, but what it says is not checked further. Raises BadEntry as ``decode``."""
    kind, record = _open(buffer, offset)
    if kind == _ENTRY and len(record) >= _PREFIX.size + _FIXED.size + _CHECKSUM_BYTES:
        fingerprint, key, edge, at, num_bytes, num_tokens = _PEEKED.unpack_from(record, _PREFIX.size)
        if edge <= MAX_EDGE and at + num_bytes <= _MAX_OFFSET:
            return Peek(fingerprint, edge, num_tokens, at, num_bytes, len(record), key)
    elif kind == _TOMBSTONE and len(record) == _PREFIX.size + _NUMBER.size + _CHECKSUM_BYTES:
        (number,) = _NUMBER.unpack_from(record, _PREFIX.size)
        if number <= _MAX_OFFSET:
            return Tombstone(number, len(record))
    raise BadEntry("header", f"record of kind {kind} says what cannot be")


def check_identity(
    header: Header, *, fingerprint: bytes, namespace: bytes, parent_key: bytes, key: bytes | None = None
) -> None:
    """Raise BadEntry unless the entry is this model's, this namespace's and hangs below this path.

    ``key`` is that of the path at the entry's end, where the caller knows all of its tokens.
    """
    if header.fingerprint != fingerprint:
        raise BadEntry("fingerprint", "it is of another model or layout")
    if header.namespace != namespace:
        raise BadEntry("namespace", "it is of another namespace")
    if header.parent_key != parent_key or (key is not None and header.key != key):
        raise BadEntry("identity", "it is of another path")


def extent_of(offset: int, chunks: Iterable[Buffer]) -> Extent:
    """The extent at ``offset`` of the payload that holds the chunks one after the other."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    for chunk in chunks:
        digest.update(chunk)
        num_bytes += memoryview(chunk).nbytes
    return Extent(offset, num_bytes, digest.digest())


def check_extent(extent: Extent, chunks: Iterable[Buffer]) -> None:
    """Raise BadEntry("checksum") unless the chunks, one after the other, are the extent's bytes."""
    if extent_of(extent.offset, chunks) != extent:
        raise BadEntry(
            "checksum", f"the {extent.num_bytes} bytes at {extent.offset} of the payload are not those written"
        )


def _seal(kind: int, body: bytes) -> bytes:
    length = _PREFIX.size + len(body) + _CHECKSUM_BYTES
    if length > MAX_RECORD_BYTES:
        raise ValueError(f"record has {length} bytes: expected at most {MAX_RECORD_BYTES}")
    record = _PREFIX.pack(MAGIC, FORMAT_VERSION, kind, length) + body
    return record + xxhash.xxh3_128_digest(record)


def _open(buffer: Buffer, offset: int) -> tuple[int, memoryview]:
    """Kind and bytes of the undamaged record at ``offset``."""
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
    end = offset + length
    if not _PREFIX.size + _CHECKSUM_BYTES <= length <= MAX_RECORD_BYTES or end > len(view):
        raise BadEntry("length", f"it says {length} bytes, and {len(view) - offset} are there")
    if xxhash.xxh3_128_digest(view[offset : end - _CHECKSUM_BYTES]) != view[end - _CHECKSUM_BYTES : end]:
        raise BadEntry("header", "its checksum does not hold")
    return kind, view[offset:end]


def _form_text(form: Form) -> str:
    """As ``str(form)``, with every digit of the kept fraction."""
    text = "exact" if form.press is None else f"{form.press}@{float(form.kept_fraction)!r}"
    return text if form.codec == "raw" else f"{text}+{form.codec}"


def _parse_form(text: str) -> Form:
    """The form with that ``_form_text``, and no other. Raises ValueError."""
    base, _, codec = text.partition("+")
    form = Form.parse(base)
    form = Form(form.press, form.kept_fraction, codec or "raw")
    if _form_text(form) != text or not _CODEC.fullmatch(form.codec):
        raise ValueError(f"form {text!r} is not written the one way it can be")
    return form


def _problem(header: Header) -> str | None:
    """Why no entry can be like this, or None."""
    shape, form, num_slots = header.shape, header.form, header.num_slots
    digests = (header.fingerprint, header.namespace, header.parent_key, header.key)
    if any(len(digest) != KEY_BYTES for digest in digests):
        return f"a key or fingerprint has not {KEY_BYTES} bytes"
    if shape.dtype not in ITEM_BYTES:
        return f"dtype {shape.dtype!r} is not known"
    counts = (shape.num_layers, shape.num_heads, shape.head_dim, shape.page_size, header.num_tokens)
    if not all(0 < count < 2**32 for count in counts) or len(header.tokens) % 4:
        return f"one of its sizes {counts} is none"
    if not 0 <= header.start <= _MAX_POSITION - header.num_tokens:
        return f"{header.num_tokens} tokens from position {header.start} on end above {_MAX_POSITION}"
    if any(count % shape.page_size for count in (header.start, header.num_tokens, num_slots)):
        return f"it is not made of whole pages of {shape.page_size} tokens"
    try:
        if _parse_form(_form_text(form)) != form:
            return f"form {form} cannot be written"
    except ValueError as error:
        return str(error)
    if not (num_slots == header.num_tokens if form.press is None else 0 <= num_slots <= header.num_tokens):
        return f"{num_slots} slots cannot hold {header.num_tokens} tokens in form {form}"
    if len(header.extents) != shape.num_layers + (form.press is not None):
        return f"it has {len(header.extents)} extents for {shape.num_layers} layers"
    end = 0
    for number, extent in enumerate(header.extents):
        if number == shape.num_layers:
            expected = shape.survivors_bytes(num_slots)
        else:
            expected = shape.layer_bytes(num_slots) if form.codec == "raw" else extent.num_bytes
        if extent.offset != end or not 0 <= extent.num_bytes == expected or len(extent.digest) != KEY_BYTES:
            return f"extent {number} is {extent.num_bytes} bytes at {extent.offset}: expected {expected} at {end}"
        end += extent.num_bytes
    if not 0 <= header.payload_offset <= _MAX_OFFSET - end:
        return f"{end} bytes at {header.payload_offset} end above {_MAX_OFFSET}"
    return None
