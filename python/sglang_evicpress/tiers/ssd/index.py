"""Index of SSD entries: found by lookup key, in little memory, oldest first when space is needed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES
from sglang_evicpress.tiers.ssd.scan import ScannedRecords

MAX_PAYLOAD_OFFSET = BLOCK_BYTES << 32
"""A payload begins before this byte of its segment."""

_NONE, _GARBAGE = -1, -2
_ROW_BITS = 32


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of one published entry, never given to another; ``num_bytes`` is its payload's size."""

    segment: int
    row: int
    num_bytes: int
    num_tokens: int


class Place(NamedTuple):
    """Place of an entry within its segment's two files, in bytes."""

    record_offset: int
    record_bytes: int
    payload_offset: int
    payload_bytes: int
    num_tokens: int


class _Rows:
    """The entries of one segment, in the order in which they were published. Rows are never used again."""

    __slots__ = (
        "blocks",
        "first",
        "lookup_keys",
        "older",
        "record_bytes",
        "record_offsets",
        "sizes",
        "tokens",
    )

    def __init__(self) -> None:
        self.lookup_keys = array("q")  # _DEAD for a removed entry
        self.older = array("q")  # handle of the next older entry of the same lookup key, or _NONE
        self.record_offsets = array("Q")
        self.record_bytes = array("I")
        self.blocks = array("I")
        self.sizes = array("Q")
        self.tokens = array("I")
        self.first = 0  # no row before it is live

    def live(self, begin: int = 0) -> Iterator[int]:
        """The rows from ``begin`` on of entries that were not removed."""
        keys = self.lookup_keys
        return (row for row in range(max(self.first, begin), len(keys)) if keys[row] != _GARBAGE)

    def place(self, row: int) -> Place:
        return Place(
            self.record_offsets[row],
            self.record_bytes[row],
            self.blocks[row] * BLOCK_BYTES,
            self.sizes[row],
            self.tokens[row],
        )


class Index:
    """All entries of a store: 44 bytes in columns and a dict item each. Not thread-safe."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # lookup key -> handle
        self._segments: dict[int, _Rows] = {}
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, ref: Ref) -> bool:
        return self.place(ref) is not None

    def add(self, segment: int, lookup_key: int, place: Place) -> Ref:
        """Publish an entry as the newest of its lookup key and of its segment."""
        rows = self._segments.setdefault(segment, _Rows())
        row = len(rows.lookup_keys)
        rows.record_offsets.append(place.record_offset)
        rows.record_bytes.append(place.record_bytes)
        rows.blocks.append(place.payload_offset // BLOCK_BYTES)
        rows.sizes.append(place.payload_bytes)
        rows.tokens.append(place.num_tokens)
        self._link(segment, rows, row, [lookup_key])
        return Ref(segment, row, place.payload_bytes, place.num_tokens)

    def add_all(self, segment: int, records: ScannedRecords) -> None:
        """Publish the entries of a segment that was read."""
        rows = self._segments.setdefault(segment, _Rows())
        row = len(rows.lookup_keys)
        _extend(rows.record_offsets, records.offsets)
        _extend(rows.record_bytes, records.record_bytes)
        _extend(rows.blocks, records.payload_offsets // BLOCK_BYTES)
        _extend(rows.sizes, records.payload_bytes)
        _extend(rows.tokens, records.num_tokens)
        self._link(segment, rows, row, records.lookup_keys.tolist())

    def find(self, lookup_key: int) -> list[Ref]:
        """The entries of a lookup key, newest first."""
        refs = []
        handle = self._newest.get(lookup_key, _NONE)
        while handle != _NONE:
            segment, row = _split(handle)
            rows = self._segments[segment]
            refs.append(Ref(segment, row, rows.sizes[row], rows.tokens[row]))
            handle = rows.older[row]
        return refs

    def place(self, ref: Ref) -> Place | None:
        """Place of an entry, or None once it was removed."""
        rows = self._segments.get(ref.segment)
        if rows is None or ref.row >= len(rows.lookup_keys) or rows.lookup_keys[ref.row] == _GARBAGE:
            return None
        return rows.place(ref.row)

    def remove(self, ref: Ref) -> Place | None:
        """Forget it; where it was, or None when it was forgotten before."""
        place = self.place(ref)
        if place is not None:
            self._unlink(ref.segment, self._segments[ref.segment], ref.row)
        return place

    def remove_segment(self, segment: int) -> None:
        """Forget all entries of a segment, and the segment."""
        if (rows := self._segments.get(segment)) is not None:
            for row in rows.live():
                self._unlink(segment, rows, row)
            del self._segments[segment]

    def places(self, segment: int) -> list[Place]:
        """Places of the entries of a segment, in the order in which they were published."""
        rows = self._segments.get(segment)
        return [] if rows is None else [rows.place(row) for row in rows.live()]

    def refs_behind(self, last: Ref | None, limit: int) -> list[Ref]:
        """At most ``limit`` entries published after ``last`` (which may be gone by now), or the first ones."""
        refs: list[Ref] = []
        for segment in sorted(self._segments):
            if last is not None and segment < last.segment:
                continue
            rows = self._segments[segment]
            while rows.first < len(rows.lookup_keys) and rows.lookup_keys[rows.first] == _GARBAGE:
                rows.first += 1
            for row in rows.live(last.row + 1 if last is not None and segment == last.segment else 0):
                refs.append(Ref(segment, row, rows.sizes[row], rows.tokens[row]))
                if len(refs) == limit:
                    return refs
        return refs

    def _link(self, segment: int, rows: _Rows, row: int, lookup_keys: Sequence[int]) -> None:
        newest, older = self._newest, rows.older
        handle = segment << _ROW_BITS | row
        for lookup_key in lookup_keys:
            older.append(newest.get(lookup_key, _NONE))
            newest[lookup_key] = handle
            handle += 1
        rows.lookup_keys.extend(lookup_keys)
        self._num_live += len(lookup_keys)

    def _unlink(self, segment: int, rows: _Rows, row: int) -> None:
        lookup_key, handle = rows.lookup_keys[row], segment << _ROW_BITS | row
        newer, at = None, self._newest[lookup_key]
        while at != handle:
            newer = at
            number, other = _split(at)
            at = self._segments[number].older[other]
        if newer is not None:
            number, other = _split(newer)
            self._segments[number].older[other] = rows.older[row]
        elif rows.older[row] == _NONE:
            del self._newest[lookup_key]
        else:
            self._newest[lookup_key] = rows.older[row]
        rows.lookup_keys[row] = _GARBAGE
        self._num_live -= 1


def _extend(column: array[int], values: np.ndarray) -> None:
    column.frombytes(values.astype(column.typecode).tobytes())


def _split(handle: int) -> tuple[int, int]:
    return handle >> _ROW_BITS, handle & (1 << _ROW_BITS) - 1
