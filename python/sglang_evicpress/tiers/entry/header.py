"""Header of an entry, and the checks that keep a wrong one from being served.

An entry is one radix-tree node in one form. Its payload is, for each layer, K rows [num_slots, num_heads, head_dim]
then V rows, or what a codec makes of both, and, where a press dropped tokens, positions int32 [num_layers, num_heads,
num_slots] then logical int32 [num_slots]; it has no gaps. Where layers keep different numbers of tokens, each has rows
and positions, int32 [num_heads, count], of the slots that it fills, and behind logical is which those are: uint8
[num_layers, (num_slots + 7) // 8], a bit for each slot, the lowest first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import xxhash

from sglang_evicpress.codec import Codec, get_codec
from sglang_evicpress.codec.layout import can_store, stored_bytes, stored_header
from sglang_evicpress.core import CODECS, Form
from sglang_evicpress.tiers.entry.identity import KEY_BYTES, lookup_key_of
from sglang_evicpress.tiers.entry.key import SEAL_BYTES, Buffer, Key

if TYPE_CHECKING:
    from torch import Tensor

MAX_OFFSET = 2**63 - 1
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
    "unsafe",
    "key",
    "shortage",
)
SHORTAGE = "shortage"
"""Files or memory were short: this says nothing of the entry."""
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

_MAX_POSITION = 2**31 - 1  # positions are int32
_CODEC = re.compile(r"[0-9A-Za-z_.-]{1,32}")
EXTENT = Struct("<QQ16s")
"""An extent in a record: offset, bytes, digest."""


class BadEntry(Exception):
    """An entry that must not be served; ``reason`` is one of REASONS, under which the miss is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in REASONS:
            raise ValueError(f"reason {reason!r} is not known: expected one of {', '.join(REASONS)}")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Extent(NamedTuple):
    """``num_bytes`` of the payload from ``offset`` on, and their xxh3-128 digest (16 bytes)."""

    offset: int
    num_bytes: int
    digest: bytes


class ExtentTable(Sequence[Extent]):
    """Extents in 32 bytes each, as records have them: a held entry of 32 layers would take 7 KB as objects."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> ExtentTable:
        """The table of these extents. Raises ValueError for numbers that a record cannot have."""
        if isinstance(extents, cls):
            return extents
        try:
            return cls(b"".join(EXTENT.pack(*extent) for extent in extents))
        except StructError as error:
            raise ValueError(f"extents {extents} cannot be written: {error}") from error

    def __len__(self) -> int:
        return len(self.packed) // EXTENT.size

    @overload
    def __getitem__(self, index: int) -> Extent: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Extent, ...]: ...
    def __getitem__(self, index: int | slice) -> Extent | tuple[Extent, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Extent(*EXTENT.unpack_from(self.packed, range(len(self))[index] * EXTENT.size))

    def __iter__(self) -> Iterator[Extent]:
        return map(Extent._make, EXTENT.iter_unpack(self.packed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of one rank; ``dtype`` is torch's name without ``torch.``, one of ITEM_BYTES."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    page_size: int

    @classmethod
    def of(cls, k_buffers: Sequence[Tensor], page_size: int) -> Shape:
        """That of a pool with these buffers, [slots, heads, head_dim] each."""
        first = k_buffers[0]
        dtype = str(first.dtype).removeprefix("torch.")
        return cls(len(k_buffers), int(first.shape[1]), int(first.shape[2]), dtype, page_size)

    def layer_bytes(self, num_slots: int) -> int:
        """K and V of one layer, as they are in the pool."""
        return 2 * num_slots * self.num_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def stored_bytes(self, num_slots: int, codec: str) -> int:
        """K and V of one layer, as a codec stores them."""
        if codec == "raw":
            return self.layer_bytes(num_slots)
        return stored_bytes(codec, num_slots, self.num_heads * self.head_dim, ITEM_BYTES[self.dtype])

    def can_be_stored(self, codec: str) -> bool:
        """True if a codec stores such rows."""
        return codec == "raw" or can_store(codec, self.num_heads * self.head_dim, self.dtype)

    def survivors_bytes(self, num_slots: int, layer_slots: Sequence[int] = ()) -> int:
        """Positions and logical indices of the tokens that a press kept, of a different number in each layer where
        ``layer_slots`` says so."""
        if layer_slots:
            return 4 * (self.num_heads * sum(layer_slots) + num_slots) + self.num_layers * ((num_slots + 7) // 8)
        return 4 * num_slots * (self.num_layers * self.num_heads + 1)

    def extent_sizes(
        self, num_slots: int, codec: str, *, is_pressed: bool, layer_slots: Sequence[int] = ()
    ) -> list[int]:
        """Bytes of every extent: one of each layer, and of survivors."""
        if layer_slots:
            by_count = {count: self.stored_bytes(count, codec) for count in set(layer_slots)}
            sizes = [by_count[count] for count in layer_slots]
        else:
            sizes = [self.stored_bytes(num_slots, codec)] * self.num_layers
        return [*sizes, self.survivors_bytes(num_slots, layer_slots)] if is_pressed else sizes


@dataclass(frozen=True, slots=True)
class Header:
    """Entry of a store. ``start`` is the absolute position of its first token, ``tokens`` are little-endian uint32.

    ``parent_key`` and ``key`` are the path's hash at its start and at its end. ``is_lossy_prefix`` says that its KV
    was computed behind a lossy prefix. There is one extent per layer, and one more for a press's survivors;
    ``payload_offset`` is where the payload begins in whatever file holds it; ``seals`` are a key's, SEAL_BYTES for each
    extent, nothing without a key. ``layer_slots``: how many of the slots each layer fills, () where all fill all.
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
    extents: Sequence[Extent]
    payload_offset: int = 0
    seals: bytes = b""
    layer_slots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "extents", ExtentTable.of(self.extents))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    def slots_of(self, layer: int) -> int:
        """Slots that a layer fills."""
        return self.layer_slots[layer] if self.layer_slots else self.num_slots

    @property
    def payload_bytes(self) -> int:
        if not self.extents:
            return 0
        last = self.extents[-1]
        return last.offset + last.num_bytes

    @property
    def lookup_key(self) -> int:
        """The number under which it is looked up: see ``lookup_key_of``."""
        return lookup_key_of(self.parent_key, np.frombuffer(self.tokens[: 4 * self.shape.page_size], "<u4"))


def problem_of(header: Header) -> str | None:
    """Why no entry can be like this, or None."""
    shape, form, num_slots = header.shape, header.form, header.num_slots
    digests = (header.fingerprint, header.namespace, header.parent_key, header.key)
    if any(len(digest) != KEY_BYTES for digest in digests):
        return f"a key or fingerprint has not {KEY_BYTES} bytes"
    if shape.dtype not in ITEM_BYTES:
        return f"dtype {shape.dtype!r} is not known"
    counts = (shape.num_layers, shape.num_heads, shape.head_dim, shape.page_size, header.num_tokens)
    if not all(0 < count < 2**32 for count in counts) or len(header.tokens) % 4:
        return f"layers, heads, head_dim, page_size and tokens are {counts}: expected whole numbers from 1 to 2**32 - 1"
    if not 0 <= header.start <= _MAX_POSITION - header.num_tokens:
        return f"{header.num_tokens} tokens from position {header.start} on end above {_MAX_POSITION}"
    if any(count % shape.page_size for count in (header.start, header.num_tokens, num_slots)):
        return f"it is not made of whole pages of {shape.page_size} tokens"
    try:
        if parse_form(form_text(form)) != form:
            return f"form {form} cannot be written"
    except ValueError as error:
        return str(error)
    if not (num_slots == header.num_tokens if form.press is None else 0 <= num_slots <= header.num_tokens):
        return f"{num_slots} slots cannot hold {header.num_tokens} tokens in form {form}"
    if len(header.seals) not in (0, SEAL_BYTES * len(header.extents)):
        return f"it has {len(header.seals)} bytes of seals for {len(header.extents)} extents"
    if len(header.extents) != shape.num_layers + (form.press is not None):
        return f"it has {len(header.extents)} extents for {shape.num_layers} layers"
    if form.codec not in CODECS:
        return f"codec {form.codec!r} is not known"
    if not shape.can_be_stored(form.codec):
        return f"codec {form.codec} stores no rows of {shape.num_heads} heads of {shape.head_dim} {shape.dtype}"
    if problem := _layer_slots_problem(header):
        return problem
    sizes = shape.extent_sizes(num_slots, form.codec, is_pressed=form.press is not None, layer_slots=header.layer_slots)
    end = 0
    for number, ((offset, num_bytes, _), expected) in enumerate(zip(header.extents, sizes, strict=True)):
        if offset != end or num_bytes != expected:
            return f"extent {number} is {num_bytes} bytes at {offset}: expected {expected} at {end}"
        end += num_bytes
    if not 0 <= header.payload_offset <= MAX_OFFSET - end:
        return f"{end} bytes at {header.payload_offset} end above {MAX_OFFSET}"
    return None


def _layer_slots_problem(header: Header) -> str | None:
    counts, num_slots = header.layer_slots, header.num_slots
    if not counts:
        return None
    if header.form.press is None:
        return f"its layers fill {counts} slots, and form {header.form} has all tokens"
    if len(counts) != header.shape.num_layers or not all(0 <= count <= num_slots for count in counts):
        return f"its layers fill {counts} slots: expected {header.shape.num_layers} numbers from 0 to {num_slots}"
    if any(count % header.shape.page_size for count in counts) or all(count == num_slots for count in counts):
        return f"its layers fill {counts} of {num_slots} slots: expected whole pages, and one layer with fewer"
    return None


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
    return Extent(offset, *size_and_digest(chunks))


def size_and_digest(chunks: Iterable[Buffer]) -> tuple[int, bytes]:
    """Bytes of all chunks, and their xxh3-128 digest."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    for chunk in chunks:
        digest.update(chunk)
        num_bytes += memoryview(chunk).nbytes
    return num_bytes, digest.digest()


def check_extent(extent: Extent, chunks: Iterable[Buffer], seal: tuple[Key, bytes] | None = None) -> None:
    """Raise BadEntry("checksum") unless the chunks, one after the other, are the extent's bytes, and BadEntry("key")
    unless the key has sealed them."""
    is_sealed = None
    if seal is not None:
        chunks, is_sealed = seal[0].watch_extent(chunks)
    if size_and_digest(chunks) != (extent.num_bytes, extent.digest):
        raise BadEntry(
            "checksum", f"the {extent.num_bytes} bytes at {extent.offset} of the payload are not those written"
        )
    if seal is not None and is_sealed is not None and not is_sealed(seal[1]):
        raise BadEntry("key", f"the {extent.num_bytes} bytes at {extent.offset} of the payload are not sealed with it")


def check_part(header: Header, number: int, chunks: Iterable[Buffer], seal: tuple[Key, bytes] | None = None) -> None:
    """``check_extent`` of that extent; and BadEntry("header") where a layer does not begin as its codec has it: to
    decode it could fail then, when it is too late for a miss."""
    is_layer = number < header.shape.num_layers
    expected = stored_header(header.form.codec, header.slots_of(number)) if is_layer else b""
    begin = bytearray()
    check_extent(header.extents[number], _watched(chunks, begin, len(expected)), seal)
    if begin != expected:
        raise BadEntry("header", f"layer {number} is not of codec {header.form.codec} as we have it")


def _watched(chunks: Iterable[Buffer], begin: bytearray, size: int) -> Iterator[Buffer]:
    """The chunks; their first ``size`` bytes are in ``begin`` then."""
    for chunk in chunks:
        begin += memoryview(chunk)[: size - len(begin)]
        yield chunk


def coder_of(codec: str) -> Codec:
    """The codec of that name. Raises ValueError for one that is not known, and for ``raw``."""
    coder = get_codec(codec)
    if coder is None:
        raise ValueError("codec 'raw' encodes nothing")
    return coder


def ratios_of(shape: Shape, num_slots: int = 1024) -> dict[str, float]:
    """Stored bytes over raw bytes, of so many slots, by each codec that stores such rows."""
    raw = shape.layer_bytes(num_slots)
    able = filter(shape.can_be_stored, CODECS)
    return {codec: shape.stored_bytes(num_slots, codec) / raw for codec in able}


def form_text(form: Form) -> str:
    """Text of a form like ``str(form)``, with every digit of the kept fraction."""
    text = "exact" if form.press is None else f"{form.press}@{float(form.kept_fraction)!r}"
    text = f"{text}:{form.budget}" if form.is_uneven else text
    return text if form.codec == "raw" else f"{text}+{form.codec}"


def parse_form(text: str) -> Form:
    """The form with that ``form_text``, and no other. Raises ValueError."""
    base, _, codec = text.partition("+")
    form = Form.parse(base)
    form = replace(form, codec=codec or "raw")
    if form_text(form) != text or not _CODEC.fullmatch(form.codec):
        raise ValueError(f"form {text!r} is not written the one way it can be")
    return form
