"""Rows of a profile store found in its pages one by one, whatever became of the pages that lead to them.

SQLite's file format, section 1.6 (https://www.sqlite.org/fileformat2.html): a leaf page lists its cells; a cell too
long for its page goes on in a chain of others. What is read is believed only if its own checksum says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from sglang_evicpress.tiers.identity import KEY_BYTES

PAGE_BYTES = 4096
MAX_PAYLOAD_BYTES = 1 << 24

_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 13, 10, 2
_BLOB_16 = 12 + 2 * KEY_BYTES  # serial type of a blob of 16 bytes


class Row(NamedTuple):
    """``sequence`` counts the puts: of two rows of one context, the later one holds."""

    sequence: int
    identity: bytes
    key: bytes
    payload: bytes
    checksum: bytes

    @property
    def is_good(self) -> bool:
        """Also when a column came back as something else than bytes."""
        columns = self.identity, self.key, self.payload
        return all(isinstance(column, bytes) for column in columns) and self.checksum == checksum(
            self.sequence, *columns
        )


def checksum(sequence: int, identity: bytes, key: bytes, payload: bytes) -> bytes:
    """16 bytes over all that a row says."""
    return xxhash.xxh3_128_digest(sequence.to_bytes(8, "little", signed=True) + identity + key + payload)


@dataclass(slots=True)
class Found:
    """The good rows by (identity, key), and what names a row: the sequence and (identity, key) of index entries and
    of rows that are not good."""

    rows: dict[tuple[bytes, bytes], Row] = field(default_factory=dict)
    named: set[tuple[int, tuple[bytes, bytes]]] = field(default_factory=set)

    @property
    def num_lost(self) -> int:
        """Rows that are named and not there. A page that is gone altogether may have named more."""
        sequences = {row.sequence for row in self.rows.values()}
        lost = [(number, name) for number, name in self.named if number not in sequences and name not in self.rows]
        return min(len({number for number, _ in lost}), len({name for _, name in lost}))

    def scan(self, pages: Mapping[int, bytes]) -> None:
        """Add what the file with these pages, counted from 1, holds."""
        for number, page in pages.items():
            head = 100 if number == 1 else 0
            kind = page[head]
            if kind == _TABLE_LEAF:
                for row in _table_rows(pages, page, head):
                    self._add(row)
            elif kind in (_INDEX_LEAF, _INDEX_INTERIOR):
                self.named.update(_index_entries(page, head, kind))

    def give_up(self, name: tuple[bytes, bytes]) -> None:
        """The row of that (identity, key) is of no use."""
        self.named.add((self.rows.pop(name).sequence, name))

    def _add(self, row: Row) -> None:
        name = (row.identity, row.key)
        if not row.is_good:
            self.named.add((row.sequence, name))
        elif name not in self.rows or self.rows[name].sequence < row.sequence:
            self.rows[name] = row


def _cells(page: bytes, head: int, pointers: int) -> Iterator[int]:
    """Where the cells of a page begin."""
    count = int.from_bytes(page[head + 3 : head + 5], "big")
    for at in range(pointers, min(pointers + 2 * count, PAGE_BYTES - 1), 2):
        yield int.from_bytes(page[at : at + 2], "big")


def _table_rows(pages: Mapping[int, bytes], page: bytes, head: int) -> Iterator[Row]:
    for cell in _cells(page, head, head + 8):
        num_bytes, at = _varint(page, cell)
        sequence, at = _varint(page, at)
        record = _record(pages, page, at, num_bytes)
        types, at = _types(record)
        if len(types) != 5 or types[0] or types[1] != _BLOB_16 or types[2] != _BLOB_16:
            continue
        identity, key = record[at : at + KEY_BYTES], record[at + KEY_BYTES : at + 2 * KEY_BYTES]
        payload = record[at + 2 * KEY_BYTES : -KEY_BYTES]
        yield Row(sequence - (1 << 64) if sequence >> 63 else sequence, identity, key, payload, record[-KEY_BYTES:])


def _record(pages: Mapping[int, bytes], page: bytes, at: int, num_bytes: int) -> bytes:
    """The record of ``num_bytes`` that begins at ``at`` in ``page``; shorter when its chain of pages breaks off."""
    if num_bytes <= PAGE_BYTES - 35:
        return page[at : at + num_bytes]
    if num_bytes > MAX_PAYLOAD_BYTES:
        return b""
    least = (PAGE_BYTES - 12) * 32 // 255 - 23
    local = least + (num_bytes - least) % (PAGE_BYTES - 4)
    if local > PAGE_BYTES - 35:
        local = least
    parts = [page[at : at + local]]
    left, number = num_bytes - local, int.from_bytes(page[at + local : at + local + 4], "big")
    while left > 0 and (follower := pages.get(number)):
        parts.append(follower[4 : 4 + left])
        number = int.from_bytes(follower[:4], "big")
        left -= PAGE_BYTES - 4
    return b"".join(parts)


def _index_entries(page: bytes, head: int, kind: int) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    """An entry is (identity, key, sequence) and always fits its page; in an interior page a page number precedes it."""
    is_interior = kind == _INDEX_INTERIOR
    for cell in _cells(page, head, head + (12 if is_interior else 8)):
        num_bytes, at = _varint(page, cell + 4 if is_interior else cell)
        record = page[at : at + num_bytes]
        types, at = _types(record)
        if types[:2] == [_BLOB_16, _BLOB_16] and len(types) == 3:
            end = at + 2 * KEY_BYTES
            number = 1 if types[2] == 9 else int.from_bytes(record[end:], "big", signed=True)
            yield number, (record[at : at + KEY_BYTES], record[at + KEY_BYTES : end])


def _types(record: bytes) -> tuple[list[int], int]:
    """The serial types of a record's columns, and where the first column begins."""
    end, at = _varint(record, 0)
    types = []
    while at < min(end, len(record)):
        kind, at = _varint(record, at)
        types.append(kind)
    return types, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number of one to nine bytes, and what comes behind it; beyond the end there are zeros."""
    value = 0
    for index in range(9):
        byte = data[at + index] if at + index < len(data) else 0
        if index == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 127
        if byte < 128:
            return value, at + index + 1
    raise AssertionError("a ninth byte always ends a number")
