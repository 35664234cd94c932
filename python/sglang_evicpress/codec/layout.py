"""Layouts of a stored layer by numbers alone: who only looks at entries needs no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, prod
from struct import Struct
from struct import error as StructError

from sglang_evicpress.codec.base import StoredFormError

HEADER = Struct("<BBHII4x")  # version, bits of a code, group, window, slots
FLAG_AT = 12  # four bytes, zero in what is stored; while a layer is written a device says there: not finite
VERSION = 1
GROUP = 32
BITS = {"int8": 8, "int4": 4, "int2": 2}
LOSSLESS, LOSSLESS_BITS = "lossless", 12
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Groups of ``group`` slots begin at slot 0; the newest ``window`` stay raw. ``item_bytes``: of a raw value."""

    bits: int
    group: int
    window: int
    num_slots: int
    num_channels: int
    item_bytes: int

    @property
    def num_quantised(self) -> int:
        return max(0, self.num_slots - self.window)

    @property
    def num_groups(self) -> int:
        return self.num_quantised // self.group

    @property
    def num_grouped(self) -> int:
        return self.num_groups * self.group

    @property
    def values_group(self) -> int:
        return gcd(self.group, self.num_channels)

    def extents(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Shape and bytes of a value of: ends of key groups, ends of value groups, raw keys, raw values, codes of keys,
        codes of values; in the order in which they are stored."""
        channels, num_groups, num_quantised = self.num_channels, self.num_groups, self.num_quantised
        of_byte = 8 // self.bits
        return (
            ((2, num_groups, 1, channels), self.item_bytes),
            ((2, num_quantised, channels // self.values_group, 1), self.item_bytes),
            ((self.num_slots - self.num_grouped, channels), self.item_bytes),
            ((self.num_slots - num_quantised, channels), self.item_bytes),
            ((num_groups, self.group // of_byte, channels), 1),
            ((num_quantised, channels // of_byte, 1), 1),
        )

    @property
    def num_bytes(self) -> int:
        return HEADER.size + sum(prod(shape) * item_bytes for shape, item_bytes in self.extents())

    def header(self) -> bytes:
        return HEADER.pack(VERSION, self.bits, self.group, self.window, self.num_slots)

    def places(self) -> tuple[int, ...]:
        """Where each of ``extents`` begins."""
        sizes = [prod(shape) * item_bytes for shape, item_bytes in self.extents()]
        return tuple(accumulate(sizes[:-1], initial=HEADER.size))

    def part(self, begin: int, end: int) -> tuple[GroupLayout, list[tuple[int, int]]]:
        """The layout of slots [begin, end) by themselves, and where its bytes behind the header lie in this one, in
        order, as (begin, end). ``begin`` is that of a group, ``end`` too or that of all slots."""
        if begin % self.group or not (end % self.group == 0 or end == self.num_slots) or not begin <= end:
            raise ValueError(f"part is [{begin}, {end}) of {self.num_slots}: expected whole groups of {self.group}")
        num_raw = end - max(begin, min(end, self.num_quantised))
        part = replace(self, num_slots=end - begin, window=num_raw)
        rows = (
            (2, self.num_groups, begin // self.group),
            (2, self.num_quantised, begin),
            (1, 0, begin - self.num_grouped),
            (1, 0, begin - self.num_quantised),
            (1, 0, begin // self.group),
            (1, 0, begin),
        )  # tables of an extent, rows from one to the next, first row
        spans: list[tuple[int, int]] = []
        for at, (tables, step, first), (shape, item_bytes) in zip(self.places(), rows, part.extents(), strict=True):
            num_rows, *row = shape[tables - 1 :]
            row_bytes = prod(row) * item_bytes
            for table in range(tables):
                start = at + (table * step + max(0, first)) * row_bytes
                if num_rows and spans and spans[-1][1] == start:
                    start = spans.pop()[0]
                if num_rows:
                    spans.append((start, at + (table * step + max(0, first) + num_rows) * row_bytes))
        return part, spans


@dataclass(frozen=True, slots=True)
class LosslessLayout:
    """Values of bfloat16 in 12 bits, and room for some exponents. Blocks of 32 slots begin at slot 0, each one of K and
    one of V; the slots behind the last whole block stay raw, their K, then their V."""

    num_slots: int
    num_channels: int

    @property
    def num_blocks(self) -> int:
        return self.num_slots // GROUP

    @property
    def num_coded(self) -> int:
        return self.num_blocks * GROUP

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Bytes of a block's parts, in order: tops of rows, signs and mantissas, codes, escaped exponents."""
        return GROUP, GROUP * self.num_channels, GROUP // 2 * self.num_channels, self.num_channels

    @property
    def block_bytes(self) -> int:
        return sum(self.extents)

    @property
    def num_bytes(self) -> int:
        num_raw = self.num_slots - self.num_coded
        return HEADER.size + 2 * self.num_blocks * self.block_bytes + 4 * num_raw * self.num_channels

    def header(self) -> bytes:
        return HEADER.pack(VERSION, LOSSLESS_BITS, GROUP, 0, self.num_slots)

    @property
    def group(self) -> int:
        """Slots of a block, without which none of its rows can be read."""
        return GROUP

    def part(self, begin: int, end: int) -> tuple[LosslessLayout, list[tuple[int, int]]]:
        """See ``GroupLayout``: the parts of a block lie side by side, and the raw rows behind the last block."""
        if begin % GROUP or not (end % GROUP == 0 or end == self.num_slots) or not begin <= end:
            raise ValueError(f"part is [{begin}, {end}) of {self.num_slots}: expected whole blocks of {GROUP}")
        part, start = replace(self, num_slots=end - begin), HEADER.size + 2 * begin // GROUP * self.block_bytes
        return part, [(start, start + part.num_bytes - HEADER.size)]

    def check(self, header: bytes, num_bytes: int) -> None:
        """Raise StoredFormError unless a layer of ``num_bytes`` with that header has this layout."""
        if header != self.header() or num_bytes != self.num_bytes:
            raise StoredFormError(
                f"layer of {num_bytes} bytes begins with {header.hex()}: expected {self.num_bytes} bytes and "
                f"{self.header().hex()}"
            )


def can_store(codec: str, num_channels: int, dtype: str) -> bool:
    """True if a codec stores rows of so many channels of a dtype, torch's name without ``torch.``: values of 16 or 32
    bits, for ``lossless`` bfloat16 alone, and channels a multiple of 8."""
    has_dtype = dtype == "bfloat16" if codec == LOSSLESS else codec in BITS and dtype in DTYPES
    return has_dtype and num_channels % 8 == 0


def layout_of(codec: str, num_slots: int, num_channels: int, item_bytes: int) -> GroupLayout:
    """The layout of a codec with its default settings. Raises KeyError for one that is not known."""
    return GroupLayout(BITS[codec], GROUP, 0, num_slots, num_channels, item_bytes)


def stored_layout(header: bytes, num_bytes: int, expected: GroupLayout) -> GroupLayout:
    """The layout that a layer of ``num_bytes`` with that header says it has: group and window may have been others when
    it was written. Raises StoredFormError unless the rest is as ``expected``."""
    try:
        version, bits, group, window, slots = HEADER.unpack(header)
    except StructError:
        raise StoredFormError(f"{len(header)} bytes are less than a header's {HEADER.size}") from None
    if (version, bits, slots) != (VERSION, expected.bits, expected.num_slots) or group % 8 or not group:
        raise StoredFormError(
            f"header says version {version}, {bits} bits, groups of {group}, {slots} slots: expected version "
            f"{VERSION}, {expected.bits} bits, a multiple of 8, {expected.num_slots} slots"
        )
    layout = replace(expected, group=group, window=window)
    if num_bytes != layout.num_bytes:
        raise StoredFormError(f"layer has {num_bytes} bytes: expected {layout.num_bytes}")
    return layout


def stored_bytes(codec: str, num_slots: int, num_channels: int, item_bytes: int) -> int:
    """Bytes of K and V of one layer by a codec with its default settings. Raises KeyError for one that is not known."""
    if codec == LOSSLESS:
        return LosslessLayout(num_slots, num_channels).num_bytes
    return layout_of(codec, num_slots, num_channels, item_bytes).num_bytes


def stored_header(codec: str, num_slots: int) -> bytes:
    """Bytes that a layer begins with; none where the codec is not known."""
    if codec == LOSSLESS:
        return LosslessLayout(num_slots, 0).header()
    return layout_of(codec, num_slots, 0, 0).header() if codec in BITS else b""
