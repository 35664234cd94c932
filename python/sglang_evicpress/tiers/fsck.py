"""Checks every byte of the SSD tier's folders that an entry vouches for, and repairs what it can."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sglang_evicpress.tiers.entry import BadEntry, Header, decode
from sglang_evicpress.tiers.files import BLOCK_BYTES, Files, StoreError, lock_folder, reason_of, round_up
from sglang_evicpress.tiers.segments import SegmentFiles, check_arriving, gaps

__all__ = ["Report", "StoreError", "fsck"]


@dataclass(slots=True)
class Report:
    """What was found: entries ``ok`` and their payload bytes, ``bad`` records and entries by reason, bytes of payload
    that no good entry owns, and .head files that end within a record."""

    folders: list[Path] = field(default_factory=list)
    num_segments: int = 0
    ok: int = 0
    ok_bytes: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    orphan_bytes: int = 0
    torn_tails: int = 0
    is_repaired: bool = False

    @property
    def is_clean(self) -> bool:
        return not self.bad.total() and not self.orphan_bytes and not self.torn_tails

    def lines(self) -> list[str]:
        """For people."""
        found = [
            f"{len(self.folders)} folders, {self.num_segments} segments: {self.ok} entries are good "
            f"({self.ok_bytes} bytes)"
        ]
        found += [f"bad by {reason}: {count}" for reason, count in sorted(self.bad.items())]
        if self.torn_tails:
            found.append(f"torn tails: {self.torn_tails}")
        if self.orphan_bytes:
            found.append(f"bytes without a good entry: {self.orphan_bytes}")
        if self.is_clean:
            found.append("clean")
        else:
            found.append("repaired" if self.is_repaired else "not clean: run again with --repair")
        return found


def fsck(folder: Path, *, repair: bool) -> Report:
    """Check ``folder`` and the rank folders in it; with ``repair`` remove bad entries and bytes without a good one.

    Raises StoreError when it is no folder, or while a server uses it.
    """
    if not folder.is_dir():
        raise StoreError(f"SSD folder {folder} is not a folder")
    report = Report(is_repaired=repair)
    report.folders = sorted(path for path in folder.glob("rank-*") if path.is_dir())
    if any(folder.glob("segment-*")) or not report.folders:
        report.folders.insert(0, folder)
    for path in report.folders:
        lock_fd = lock_folder(path)
        try:
            checker = _Checker(path, report, repair)
            if repair:
                checker.disk.remove_leftovers()
            for number in checker.disk.numbers():
                report.num_segments += 1
                checker.check(number)
        except OSError as error:
            raise StoreError(f"SSD folder {path} cannot be checked: {error.strerror}") from error
        finally:
            os.close(lock_fd)
    return report


class _Checker:
    """Of one folder."""

    def __init__(self, folder: Path, report: Report, repair: bool) -> None:
        self.disk = SegmentFiles(str(folder), Files())
        self._report = report
        self._repair = repair
        self._buffer = mmap.mmap(-1, BLOCK_BYTES)

    def check(self, number: int) -> None:
        report = self._report
        kv, head = self.disk.sizes(number)
        if head is None:
            report.orphan_bytes += kv[1] if kv else 0
            if self._repair:
                self.disk.unlink(number)
            return
        found = self.disk.read_head(number)
        is_torn = found.end < found.num_bytes
        num_bad = report.bad.total()
        report.torn_tails += is_torn
        report.bad.update(reason for offset, reason in found.bad if offset < found.end)
        good, taken = [], []
        for header, record in self._good(number, found.records.offsets.tolist(), found.records.record_bytes.tolist()):
            good.append(record)
            taken.append((header.payload_offset, round_up(header.payload_bytes)))
            report.ok += 1
            report.ok_bytes += header.payload_bytes
        holes = gaps(taken, round_up(kv[0])) if kv else []
        orphans = self.disk.data_bytes(number, holes) if kv else 0
        report.orphan_bytes += orphans
        if not self._repair:
            return
        if not good:
            self.disk.unlink(number)
            return
        if is_torn or report.bad.total() > num_bad:
            self.disk.rewrite_head(number, good)
        if orphans:
            self.disk.cut(number, kv_bytes=max(sum(range_) for range_ in taken))
            self.disk.punch(number, holes)

    def _good(self, number: int, offsets: list[int], sizes: list[int]) -> Iterator[tuple[Header, bytes]]:
        for offset, num_bytes in zip(offsets, sizes, strict=True):
            try:
                record = self.disk.read_record(number, offset, num_bytes)
                header, _ = decode(record)
                if header.payload_offset % BLOCK_BYTES:
                    raise BadEntry("header", "its payload does not begin on a block")
                self._read(number, header)
            except BadEntry as error:
                self._report.bad[error.reason] += 1
            except OSError as error:
                self._report.bad[reason_of(error)] += 1
            else:
                yield header, record

    def _read(self, number: int, header: Header) -> None:
        kv, _ = self.disk.sizes(number)
        if kv is None:
            raise BadEntry("missing", "there is no file with its payload")
        if header.payload_offset + header.payload_bytes > kv[0]:
            raise BadEntry("length", "the file ends before its payload does")
        if len(self._buffer) < header.payload_bytes:
            self._buffer = mmap.mmap(-1, round_up(header.payload_bytes))
        chunk = memoryview(self._buffer)[: header.payload_bytes]
        with closing(self.disk.read_payload(number, header.payload_offset, [chunk])) as arriving:
            check_arriving(header.extents, arriving)
