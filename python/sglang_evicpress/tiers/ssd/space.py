"""Bytes of the SSD store by holder: bookkeeping alone, without files. Not thread-safe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES, round_up

MAX_HEAD_BYTES = 64 << 20  # of a segment that goes on growing: a start reads a head at once


@dataclass(slots=True, eq=False)
class Reservation:
    """Space for one payload at ``offset`` of a segment, and ``record_bytes`` for its record; held until it is written
    or released."""

    segment: int
    offset: int
    num_bytes: int
    record_bytes: int
    is_held: bool = True

    @property
    def size(self) -> int:
        """In whole blocks."""
        return round_up(self.num_bytes)


@dataclass(slots=True, eq=False)
class Segment:
    """The bytes of one segment, payloads in whole blocks, and what is to be done for it.

    ``holes`` are garbage ranges (offset, bytes) to give back; ``has_gaps`` says that all between its entries is one.
    ``tombstoned`` bytes of its head only say what is garbage. A foreign one holds what we do not serve; an obsolete one
    goes as soon as it can.
    """

    number: int
    end: int = 0
    live: int = 0
    garbage: int = 0
    reserved: int = 0
    head: int = 0
    tombstoned: int = 0
    num_live: int = 0
    num_reserved: int = 0
    is_sealed: bool = False
    is_foreign: bool = False
    is_obsolete: bool = False
    has_gaps: bool = False
    is_synced: bool = True
    is_named: bool = False
    holes: list[tuple[int, int]] = field(default_factory=list)
    untombstoned: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Bytes that it takes of the disk, or may take."""
        return self.live + self.garbage + self.reserved + round_up(self.head)


class Space:
    """All segments of a store. New payloads go to the end of the open one, until it has ``segment_bytes``."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self.used = 0
        self.reserved = 0
        self.can_punch = True
        self.reclaimable: set[int] = set()  # where something can be given back
        self._open: Segment | None = None
        self._last_number = 0
        self._foreign: list[int] = []

    @contextmanager
    def change(self, segment: Segment) -> Iterator[None]:
        """Whatever is changed of the segment meanwhile is counted."""
        former, reserved = segment.held, segment.reserved
        yield
        self.used += segment.held - former
        self.reserved += segment.reserved - reserved

    def put(self, segment: Segment) -> None:
        """Count a segment that was found; no payload is added to it."""
        segment.is_sealed = True
        self.segments[segment.number] = segment
        self._last_number = max(self._last_number, segment.number)
        self.used += segment.held
        if segment.is_foreign:
            self._foreign.append(segment.number)
        if segment.is_obsolete or segment.has_gaps:
            self.reclaimable.add(segment.number)

    def reserve(self, num_bytes: int) -> Reservation | None:
        """Space at the end of the open segment, or None when there is not enough; then foreign segments are
        obsolete."""
        size = round_up(num_bytes)
        record_bytes = BLOCK_BYTES + num_bytes // 32  # records are smaller than this, unless payloads are tiny
        lacking = self.used + size + record_bytes - self.capacity_bytes
        if lacking > 0:
            self.make_foreign_obsolete(lacking - self._to_give_back)
            return None
        segment = self._segment_for(size)
        reservation = Reservation(segment.number, segment.end, num_bytes, record_bytes)
        with self.change(segment):
            segment.end += size
            segment.reserved += size + record_bytes
            segment.num_reserved += 1
        return reservation

    def give_back(self, reservation: Reservation, *, is_written: bool) -> None:
        """End a reservation; what may have been written is garbage."""
        segment = self._end(reservation)
        if is_written and reservation.size:
            with self.change(segment):
                segment.garbage += reservation.size
                segment.holes.append((reservation.offset, reservation.size))
        elif not segment.is_sealed and segment.end == reservation.offset + reservation.size:
            segment.end = reservation.offset
        self.reclaimable.add(segment.number)

    def publish(self, reservation: Reservation) -> None:
        """End a reservation; what was written is live."""
        segment = self._end(reservation)
        with self.change(segment):
            segment.live += reservation.size
            segment.num_live += 1

    def mark_garbage(self, number: int, offset: int, payload_bytes: int, record_bytes: int) -> None:
        """Mark an entry as garbage."""
        segment, size = self.segments[number], round_up(payload_bytes)
        with self.change(segment):
            segment.live -= size
            segment.garbage += size
            segment.num_live -= 1
            segment.tombstoned += record_bytes
        if size:
            segment.holes.append((offset, size))
        self.reclaimable.add(number)

    def set_head(self, segment: Segment, num_bytes: int, *, tombstoned: int = 0) -> None:
        """Its .head file has grown to this, ``tombstoned`` bytes of it by a tombstone."""
        with self.change(segment):
            segment.head = num_bytes
            segment.tombstoned += tombstoned
            segment.is_synced = False

    def forget(self, segment: Segment) -> int:
        """Its files are gone; the bytes that it held."""
        del self.segments[segment.number]
        self.reclaimable.discard(segment.number)
        self.used -= segment.held
        return segment.held

    def make_excess_obsolete(self) -> list[int]:
        """Doom segments until what was found fits the capacity, foreign and then oldest ones first.

        What is garbage does not count: it can be given back, and a killed server may have left any amount of it.
        """
        excess = self.used - self.capacity_bytes - sum(segment.garbage for segment in self.segments.values())
        obsolete = []
        for number in sorted(self.segments, key=lambda number: (number not in self._foreign, number)):
            if excess > 0:
                excess -= self._make_obsolete(number) - self.segments[number].garbage
                obsolete.append(number)
        self._foreign = [number for number in self._foreign if number not in obsolete]
        return obsolete

    def is_spent(self, segment: Segment) -> bool:
        """True if the whole segment may go: nothing in it is live, or less than what it wastes and cannot give back.

        Without holes that are its garbage payloads, and with them its garbage records once they are many."""
        if not self.can_punch and segment is self._open and 2 * segment.garbage > self.segment_bytes:
            self._seal()
        if not segment.is_sealed or segment.num_reserved:
            return False
        if segment.is_obsolete or not (segment.num_live or segment.is_foreign):
            return True
        wasted = segment.tombstoned if segment.tombstoned > self.segment_bytes // 16 else 0
        if not self.can_punch:
            wasted += segment.garbage
        return wasted > segment.live

    def _end(self, reservation: Reservation) -> Segment:
        segment = self.segments[reservation.segment]
        with self.change(segment):
            segment.reserved -= reservation.size + reservation.record_bytes
            segment.num_reserved -= 1
        reservation.is_held = False
        return segment

    def _segment_for(self, size: int) -> Segment:
        segment = self._open
        if segment is not None and (
            segment.head > MAX_HEAD_BYTES or (segment.end and segment.end + size > self.segment_bytes)
        ):
            self._seal()
            segment = None
        if segment is None:
            self._last_number += 1
            segment = self._open = self.segments[self._last_number] = Segment(self._last_number)
        return segment

    def _seal(self) -> None:
        assert self._open is not None
        self._open.is_sealed = True
        self.reclaimable.add(self._open.number)
        self._open = None

    def make_foreign_obsolete(self, num_bytes: int) -> None:
        """Doom foreign segments, the oldest first, for so many bytes."""
        while self._foreign and num_bytes > 0:
            num_bytes -= self._make_obsolete(self._foreign.pop(0))

    @property
    def _to_give_back(self) -> int:
        segments = [self.segments[number] for number in self.reclaimable]
        garbage = sum(each.garbage for each in segments if not each.is_obsolete) if self.can_punch else 0
        return garbage + sum(each.held for each in segments if each.is_obsolete)

    def _make_obsolete(self, number: int) -> int:
        segment = self.segments[number]
        segment.is_obsolete = True
        self.reclaimable.add(number)
        return segment.held
