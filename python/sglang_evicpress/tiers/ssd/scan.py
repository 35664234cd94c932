"""Scan of the records of a segment, as fast as a start needs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_evicpress.tiers.entry.encoding import MAGIC, Peek, peek
from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.entry.key import Key

_LENGTH_AT = 12  # of a record, in every version of the format: its length in bytes, 4 bytes


@dataclass(frozen=True, slots=True)
class ScannedRecords:
    """Fields of a segment's entries for a start: one array each, in the order in which they were published."""

    fingerprints: np.ndarray
    offsets: np.ndarray  # of the records
    record_bytes: np.ndarray
    lookup_keys: np.ndarray
    payload_offsets: np.ndarray
    payload_bytes: np.ndarray
    num_tokens: np.ndarray
    is_ours: np.ndarray  # sealed with our key, or with none where we have none

    def __len__(self) -> int:
        return len(self.offsets)

    def select(self, mask: np.ndarray) -> ScannedRecords:
        """Records for which the mask is true."""
        return ScannedRecords(*(getattr(self, name)[mask] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Head:
    """Content of a .head file. ``records`` are entries without a tombstone; ``bad`` are offset and reason of what is
    no record; behind ``end`` there is none. ``num_bytes`` is the file's size, and not all of it could be read unless it
    ``is_whole``."""

    num_bytes: int
    records: ScannedRecords
    bad: Sequence[tuple[int, str]]
    end: int
    is_whole: bool = True


def scan(data: bytearray, key: Key | None = None) -> Head:
    """The records in ``data``, and what is no record; goes on at the next one behind damage."""
    columns = [array("q") for _ in range(6)]
    fingerprints, ours = bytearray(), bytearray()
    garbage: dict[bool, list[int]] = {True: [], False: []}  # one buries only what has the same key
    bad: list[tuple[int, str]] = []
    add_offset, add_record, add_lookup_key, add_payload, add_size, add_tokens = (column.append for column in columns)
    offset, end, size = 0, 0, len(data)
    while offset < size:
        try:
            record = peek(data, offset, key)
        except BadEntry as error:
            bad.append((offset, error.reason))
            offset = _behind(data, offset, error.reason)
            if error.reason == "version":
                end = offset
            continue
        if isinstance(record, Peek):  # kept in columns: a million tuples would keep the garbage collector busy
            fingerprint, lookup_key, num_tokens, payload_offset, payload_bytes, record_bytes, _, has_seal = record
            add_offset(offset)
            add_record(record_bytes)
            add_lookup_key(lookup_key)
            add_payload(payload_offset)
            add_size(payload_bytes)
            add_tokens(num_tokens)
            fingerprints += fingerprint
            ours.append(has_seal)
        else:
            garbage[record.is_ours].append(record.number)
        end = offset = offset + record.record_bytes
    is_ours = np.frombuffer(ours, dtype=bool)
    records = ScannedRecords(*[np.frombuffer(fingerprints, dtype="S16"), *map(np.asarray, columns), is_ours])
    if any(garbage.values()):
        is_garbage = (
            np.isin(records.offsets, garbage[True]) & is_ours | np.isin(records.offsets, garbage[False]) & ~is_ours
        )
        records = records.select(~is_garbage)
    return Head(size, records, bad, end)


def _behind(data: bytearray, offset: int, reason: str) -> int:
    """Offset of the next record behind bytes that are none we can read."""
    if reason == "version":  # another format, whose records say their length in the same place
        behind = offset + int.from_bytes(data[offset + _LENGTH_AT : offset + _LENGTH_AT + 4], "little")
        if offset + _LENGTH_AT < behind <= len(data) and data[behind : behind + len(MAGIC)] in (MAGIC, b""):
            return behind
    next_magic = data.find(MAGIC, offset + 1)
    return len(data) if next_magic < 0 else next_magic
