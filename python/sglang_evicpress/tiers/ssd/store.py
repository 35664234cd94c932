"""Entries on SSD: bounded, found again after a restart, and never served unless every check holds.

A writer reserves space, writes the payload and appends the record that publishes it; only then can it be found. An
entry that fails a check is a miss: it is counted by reason, forgotten, and its record is marked garbage.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from sglang_evicpress.threads import WatchedThread
from sglang_evicpress.tiers.entry.encoding import encode, encode_tombstone
from sglang_evicpress.tiers.entry.header import SHORTAGE, BadEntry, Header
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.folder import Folder, StoreError
from sglang_evicpress.tiers.ssd.health import DiskHealth
from sglang_evicpress.tiers.ssd.index import Index, Place, Ref
from sglang_evicpress.tiers.ssd.os_files import Files, lock_folder, parts, reason_of, round_up, unlock_folder
from sglang_evicpress.tiers.ssd.reading import Reader
from sglang_evicpress.tiers.ssd.recovery import recover
from sglang_evicpress.tiers.ssd.segments import SegmentFiles, gaps
from sglang_evicpress.tiers.ssd.space import Reservation, Space

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
SYNC_MODES = ("none", "batch", "always")

_MIN_SEGMENT_BYTES = 4 << 20
_SYNC_PERIOD_S = 2.0
_CLOSE_S = 10.0  # for writers to end, and the thread that syncs
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # say nothing about the entry


class SsdStore:
    """The entries of one model and rank in ``folder``, in at most ``capacity_bytes`` of disk. Thread-safe.

    ``sync``: "none"; "batch", every two seconds in the background; "always", before an entry is found. A killed server
    loses nothing that was published in any mode; a power failure what was not synced. Raises StoreError when the
    folder cannot be used and ValueError for arguments that cannot be. Entries of other fingerprints, without ``key`` or
    with another one are never served; they go when their room is needed. While the disk does not answer nothing is
    found and nothing written.
    """

    def __init__(
        self,
        folder: Path | Folder,
        capacity_bytes: int,
        fingerprint: bytes,
        *,
        sync: str = "batch",
        segment_bytes: int = SEGMENT_BYTES,
        backoff_s: float = 2.0,
        files: Files | None = None,
        key: Key | None = None,
    ) -> None:
        if sync not in SYNC_MODES:
            raise ValueError(f"sync mode {sync!r} is not known: expected one of {', '.join(SYNC_MODES)}")
        if capacity_bytes <= 0 or segment_bytes <= 0:
            raise ValueError(f"capacity {capacity_bytes} and segments of {segment_bytes} bytes: expected more than 0")
        self.capacity_bytes = capacity_bytes
        self.written_bytes = 0
        self.read_bytes = 0
        opened = folder if isinstance(folder, Folder) else Folder.open(folder)
        self._folder = opened.path
        self._key = key
        self._tombstone_bytes = len(encode_tombstone(0, key))
        self._sync_mode = sync
        files = Files() if files is None else files
        files.folder = opened
        self._disk = SegmentFiles(files)
        self._index = Index()
        self._space = Space(capacity_bytes, max(_MIN_SEGMENT_BYTES, min(segment_bytes, capacity_bytes // 8)))
        self._lock = threading.Condition(threading.Lock())  # of the bookkeeping: never held while a file is used
        self._appending = threading.Lock()
        self._reclaiming = threading.Lock()
        self._being_reclaimed: set[int] = set()  # whose garbage is given back now
        self._num_writing = 0
        self._is_closed = False
        self._stop = threading.Event()
        self._health = DiskHealth(opened.path, files.free_bytes, backoff_s)
        self.errors = self._health.errors  # by reason
        self._pulse = self._health.pulse
        self._reader = Reader(self._disk, self._pulse, fingerprint, key)
        self._lock_fd = lock_folder(opened)
        try:
            self._disk.remove_leftovers()
            for number in self._disk.numbers():
                segment, records = recover(self._disk, number, fingerprint, self.errors, key)
                self._space.put(segment)
                self._index.add_all(number, records)
            for number in self._space.make_excess_obsolete():
                self._index.remove_segment(number)
        except OSError as error:
            unlock_folder(self._lock_fd)
            raise StoreError(f"SSD folder {opened.path} cannot be read: {error.strerror}") from error
        self._syncer = WatchedThread("evicpress-ssd-sync", self._sync_in_background)
        self.threads = (self._syncer,)
        if sync == "batch":
            self._syncer.start()

    @property
    def num_entries(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes used of the disk: payloads live, reserved and garbage, and records."""
        return self._space.used

    @property
    def is_writable(self) -> bool:
        """Not while it is closed or does not answer, nor for some seconds after a write has failed."""
        return not (self._is_closed or self._stop.is_set()) and self._health.is_writable

    @property
    def is_answering(self) -> bool:
        """True if the disk does what it is asked to, as far as is known."""
        return self._health.is_answering

    def __contains__(self, ref: Ref) -> bool:
        with self._lock:
            return ref in self._index

    def find(self, lookup_key: int) -> list[Ref]:
        """The entries that leave a path by this lookup key, newest first; two lookup keys may be the same number. None
        while the disk does not answer."""
        if not self.is_answering:
            return []
        with self._lock:
            return self._index.find(lookup_key)

    def reserve(self, num_bytes: int) -> Reservation | None:
        """Space for a payload; None when the capacity or what is free on the disk forbids it, or nothing is written
        now. ``reclaim`` may help, and then the removal of others."""
        has_room = self._health.has_room(round_up(num_bytes), self._space.reserved)
        with self._lock:
            return self._space.reserve(num_bytes) if has_room and self.is_writable else None

    def release(self, reservation: Reservation) -> None:
        """Give back a reservation that was not written."""
        with self._lock:
            if reservation.is_held:
                self._space.give_back(reservation, is_written=False)

    @property
    def garbage_bytes(self) -> int:
        """Bytes that ``reclaim`` gives back: garbage payloads, which are not found any more, and whole segments."""
        with self._lock:
            numbers = (self._space.reclaimable | self._being_reclaimed) & self._space.segments.keys()
            segments = [self._space.segments[number] for number in numbers]
            return sum(each.held if each.is_obsolete else each.garbage for each in segments)

    def give_up_foreign(self, num_bytes: int) -> None:
        """Doom so many bytes that servers of other models have left; ``reclaim`` gives them back."""
        if num_bytes > 0:
            with self._lock:
                self._space.make_foreign_obsolete(num_bytes)

    def remove(self, ref: Ref, *, is_lazy: bool = False) -> None:
        """Forget an entry, on disk as well; ``reclaim`` gives its space back. Nothing happens if it is gone. A lazy
        removal touches no file: ``reclaim`` marks the record too, and a server killed before that finds it again."""
        with self._lock:
            place = self._index.remove(ref)
            if place is None:
                return
            self._space.mark_garbage(ref.segment, place.payload_offset, place.payload_bytes, place.record_bytes)
            if is_lazy:
                self._space.segments[ref.segment].untombstoned.append(place.record_offset)
        if not is_lazy:
            self._tombstone(ref.segment, place.record_offset)

    def entries_behind(self, last: Ref | None, limit: int) -> list[Ref]:
        """At most ``limit`` entries, oldest first, published after ``last`` (which may be gone), or the first ones."""
        with self._lock:
            return self._index.refs_behind(last, limit)

    @property
    def newest_segment(self) -> int:
        """Its number; what is written after a start is in newer ones than that found."""
        with self._lock:
            return max(self._space.segments, default=0)

    def write(self, reservation: Reservation, header: Header, chunks: Sequence[memoryview]) -> Ref:
        """Write the payload, whose bytes are those that the header's extents describe, and publish it.

        The reservation ends, whatever happens. Raises OSError, which is counted, and after which nothing is written
        for a while; ValueError when header, chunks and reservation do not fit together.
        """
        with self._lock:
            if not reservation.is_held:
                raise ValueError("the reservation is not held any more: expected a new one for every write")
            if self._stop.is_set():
                raise OSError(errno.ESHUTDOWN, "the store is closed")  # and the folder may be another's by now
            reservation.is_held = False
            self._num_writing += 1
        ref: Ref | None = None
        is_written = False
        try:
            if not header.payload_bytes == reservation.num_bytes == sum(map(len, chunks)):
                raise ValueError(
                    f"payload of {header.payload_bytes} bytes in chunks of {sum(map(len, chunks))}: "
                    f"expected the {reservation.num_bytes} reserved"
                )
            seals = b""
            if self._key is not None:
                payload = parts(chunks, [extent.num_bytes for extent in header.extents])
                seals = b"".join(map(self._key.seal_extent, payload))
            sealed = replace(header, payload_offset=reservation.offset, seals=seals)
            record = encode(sealed, self._key)
            excess = len(record) + self._tombstone_bytes - reservation.record_bytes  # over what was reserved for it
            with self._lock:
                if excess > 0 and self._space.used + excess > self._space.capacity_bytes:
                    raise OSError(errno.ENOSPC, f"there is no room for a record that is {excess} bytes longer")
            is_written = True
            with self._pulse.transfer(header.payload_bytes):
                self._disk.write_payload(reservation.segment, reservation.offset, chunks)
                ref = self._publish(reservation, header, record)
            return ref
        except OSError as error:
            (self._health.pause if is_written else self._health.count)(error)
            raise
        finally:
            with self._lock:
                self._num_writing -= 1
                self._lock.notify_all()
                if ref is None:
                    self._space.give_back(reservation, is_written=is_written)
                else:
                    self._health.succeed()
            if ref is None and is_written:
                self.reclaim()

    def read_header(self, ref: Ref) -> Header:
        """Header of the entry. Raises BadEntry; it is gone then."""
        with self._whole(ref) as place:
            return self._reader.header(ref, place)

    def read(self, ref: Ref, header: Header, chunks: Sequence[memoryview]) -> None:
        """Fill the chunks with the payload and check every extent. Raises BadEntry; the entry is gone then, and what
        the chunks hold must not be used."""
        if not header.payload_bytes == ref.num_bytes == sum(map(len, chunks)):
            raise ValueError(
                f"payload of {ref.num_bytes} bytes into chunks of {sum(map(len, chunks))} for a header of "
                f"{header.payload_bytes}: expected the same size"
            )
        with self._whole(ref) as place:
            self._reader.payload(ref, place, header, chunks)
        self._count_read(ref.num_bytes)

    def read_extent(self, ref: Ref, header: Header, number: int) -> bytes:
        """One extent of the payload, checked, without the others. Raises BadEntry; the entry is gone then."""
        with self._whole(ref) as place:
            data = bytes(self._reader.extent(ref, place, header, number))
        self._count_read(len(data))
        return data

    def reclaim(self) -> int:
        """Give the space of what was removed back to the file system; the bytes."""
        with self._reclaiming:
            if self._is_closed:
                return 0
            with self._lock:
                numbers = sorted(self._space.reclaimable)
                self._being_reclaimed = set(numbers)
                self._space.reclaimable.clear()
            num_bytes = 0
            for number in numbers:
                with self._pulse.beat():
                    num_bytes += self._reclaim(number)
                with self._lock:
                    self._being_reclaimed.discard(number)
            return num_bytes

    def sync(self) -> None:
        """Make all that was published durable. Errors are counted."""
        with self._lock:
            segments = [segment for segment in self._space.segments.values() if not segment.is_synced]
            for segment in segments:
                segment.is_synced = True
        for segment in segments:
            try:
                with self._pulse.beat():
                    self._disk.sync(segment.number, is_folder=not segment.is_named)
                segment.is_named = True
            except OSError as error:
                self._health.count(error)
                with self._lock:
                    segment.is_synced = False  # for the next time

    def abandon(self) -> None:
        """Publish nothing any more, without waiting for what is being written. The folder stays locked until ``close``
        or the end of the process."""
        self._is_closed = True

    def close(self) -> None:
        """Wait for what is being written, sync, and let others use the folder. Then nothing is found any more."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            self._lock.wait_for(lambda: not self._num_writing, _CLOSE_S)
        self.reclaim()
        with self._reclaiming, self._appending:
            self._is_closed = True
        self._syncer.stop()
        self._syncer.join(_CLOSE_S)
        self.sync()
        self._disk.close()
        with self._lock:
            self._index = Index()
        unlock_folder(self._lock_fd)

    def _publish(self, reservation: Reservation, header: Header, record: bytes) -> Ref:
        number, lookup_key = reservation.segment, header.lookup_key
        if self._sync_mode == "always":
            self._disk.sync(number, is_head=False)
        with self._appending:
            if self._is_closed:
                raise OSError(errno.ESHUTDOWN, "the store is closed")
            offset, end = self._disk.append(number, record)
            with self._lock:
                segment = self._space.segments[number]
                self._space.set_head(segment, end)
        if self._sync_mode == "always":
            try:
                self._disk.sync(number, is_payload=False, is_folder=not segment.is_named)
                segment.is_named = True
            except OSError:
                self._tombstone(number, offset)
                raise
        place = Place(offset, len(record), reservation.offset, reservation.num_bytes, header.num_tokens)
        with self._lock:
            self._space.publish(reservation)
            self.written_bytes += reservation.num_bytes
            return self._index.add(number, lookup_key, place)

    def _tombstone(self, number: int, offset: int) -> None:
        """Append the tombstone of the record at ``offset``, or have ``reclaim`` try again."""
        record = encode_tombstone(offset, self._key)
        try:
            with self._appending:
                if self._is_closed:
                    return
                _, end = self._disk.append(number, record, is_new=False)
                with self._lock:
                    if segment := self._space.segments.get(number):
                        self._space.set_head(segment, end, tombstoned=len(record))
        except FileNotFoundError:
            return
        except OSError as error:
            self._health.count(error)
            with self._lock:
                if segment := self._space.segments.get(number):
                    segment.untombstoned.append(offset)
                    self._space.reclaimable.add(number)

    def _reclaim(self, number: int) -> int:
        """Give back what is garbage of one segment, or all of it; the bytes."""
        with self._lock:
            segment = self._space.segments.get(number)
            if segment is None:
                return 0
            if is_spent := self._space.is_spent(segment):
                segment.is_obsolete = True
                self._index.remove_segment(number)
            untombstoned, segment.untombstoned = segment.untombstoned, []
            garbage, holes, segment.holes = segment.garbage, segment.holes, []
            if segment.has_gaps:
                taken = [(place.payload_offset, round_up(place.payload_bytes)) for place in self._index.places(number)]
                holes = gaps(taken, segment.end)
        try:
            if is_spent:
                self._disk.unlink(number)
                with self._lock:
                    return self._space.forget(segment)
            for offset in untombstoned:
                self._tombstone(number, offset)
            if not self._space.can_punch or not (garbage or holes):
                return 0
            self._disk.punch(number, holes)
        except OSError as error:
            if is_spent or error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                self._health.count(error)
            else:
                logger.info("SSD folder %s cannot give back parts of files: whole segments are dropped", self._folder)
                self._space.can_punch = False
            with self._lock:
                segment.holes += holes
                self._space.reclaimable.add(number)
            return 0
        with self._lock, self._space.change(segment):
            segment.garbage -= garbage
            segment.has_gaps = False
        return garbage

    @contextlib.contextmanager
    def _whole(self, ref: Ref) -> Iterator[Place]:
        """Place of the entry, while it is read; one that cannot be read is gone then. Raises BadEntry."""
        with self._lock:
            place = self._index.place(ref)
        if place is None:
            raise BadEntry("missing", "it was removed")
        try:
            yield place
        except (OSError, BadEntry) as error:
            self._fail(ref, error)

    def _count_read(self, num_bytes: int) -> None:
        with self._lock:
            self.read_bytes += num_bytes

    def _fail(self, ref: Ref, error: OSError | BadEntry) -> NoReturn:
        """Count and forget an entry that cannot be read, unless it was removed while it was read."""
        reason = error.reason if isinstance(error, BadEntry) else reason_of(error)
        is_short = isinstance(error, OSError) and error.errno in _SHORTAGES
        with self._lock:
            if ref not in self._index:
                raise BadEntry("missing", "it was removed while it was read") from error
            self._health.count(reason)
        if not is_short:
            logger.warning("an entry on SSD was dropped: %s", error)
            self.remove(ref)
        raise BadEntry(SHORTAGE if is_short else reason, str(error)) from error

    def _sync_in_background(self) -> None:
        while not self._stop.wait(_SYNC_PERIOD_S):
            self.sync()
