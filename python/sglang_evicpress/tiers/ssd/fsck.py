"""Checks every byte of the SSD tier's folders that an entry vouches for, and repairs what it can."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sglang_evicpress.tiers.entry.encoding import decode
from sglang_evicpress.tiers.entry.header import BadEntry, Header
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.folder import Folder, StoreError, UnsafeFileError
from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES, Files, lock_folder, reason_of, round_up
from sglang_evicpress.tiers.ssd.scan import ScannedRecords
from sglang_evicpress.tiers.ssd.segments import SegmentFiles, check_arriving, gaps


@dataclass(slots=True)
class Report:
    """Findings: entries ``ok`` and their payload bytes, in all and by form as [entries, bytes], ``bad`` records and
    entries by reason, bytes of payload that no good entry owns, .head files that end within a record, and entries that
    are intact but ``unsealed``: the key that was given, or that none was, does not vouch for them. They are kept."""

    folders: list[Path] = field(default_factory=list)
    num_segments: int = 0
    ok: int = 0
    ok_bytes: int = 0
    forms: dict[str, list[int]] = field(default_factory=dict)
    bad: Counter[str] = field(default_factory=Counter)
    orphan_bytes: int = 0
    torn_tails: int = 0
    unsealed: int = 0
    is_repaired: bool = False

    @property
    def is_clean(self) -> bool:
        return not self.bad.total() and not self.orphan_bytes and not self.torn_tails

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{len(self.folders)} folders, {self.num_segments} segments: {self.ok} entries are good "
            f"({self.ok_bytes} bytes)"
        ]
        lines += [f"{form}: {count} entries, {size} bytes" for form, (count, size) in sorted(self.forms.items())]
        lines += [f"bad by {reason}: {count}" for reason, count in sorted(self.bad.items())]
        if self.unsealed:
            lines.append(f"of another key, or of none, and not checked: {self.unsealed}")
        if self.torn_tails:
            lines.append(f"torn tails: {self.torn_tails}")
        if self.orphan_bytes:
            lines.append(f"bytes without a good entry: {self.orphan_bytes}")
        if self.is_clean:
            lines.append("clean")
        else:
            lines.append("repaired" if self.is_repaired else "not clean: run again with --repair")
        return lines


def fsck(folder: Path, *, repair: bool, key: Key | None = None) -> Report:
    """Check ``folder`` and the rank folders in it; with ``repair`` remove bad entries and bytes without a good one.

    ``key`` is that of the server. Raises StoreError when it is no folder, or while a server uses it.
    """
    if not folder.is_dir():
        raise StoreError(f"SSD folder {folder} is not a folder")
    report = Report(is_repaired=repair)
    base = Folder.open(folder, is_made=False)
    folders = {path: base.child(path.name, is_made=False) for path in sorted(folder.glob("rank-*")) if path.is_dir()}
    if any(folder.glob("segment-*")) or not folders:
        folders = {folder: base, **folders}
    report.folders = list(folders)
    for path, opened in folders.items():
        lock_fd = lock_folder(opened)
        try:
            checker = _Checker(opened, report, repair, key)
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
    """Check of one folder."""

    def __init__(self, folder: Folder, report: Report, repair: bool, key: Key | None) -> None:
        files = Files()
        files.folder = folder
        self.disk = SegmentFiles(files)
        self._report = report
        self._key = key
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
        try:
            scanned = self.disk.read_head(number, self._key)
        except UnsafeFileError:
            report.bad["unsafe"] += 1
            if self._repair:
                self.disk.unlink(number)
            return
        is_torn = scanned.end < scanned.num_bytes
        num_bad = report.bad.total()
        report.torn_tails += is_torn
        report.bad.update(reason for offset, reason in scanned.bad if offset < scanned.end)
        good, taken = [], []
        others = scanned.records.select(~scanned.records.is_ours)
        columns = (others.offsets, others.record_bytes, others.payload_offsets, others.payload_bytes)
        for offset, num_bytes, begin, size in zip(*(column.tolist() for column in columns), strict=True):
            if kv is None or begin % BLOCK_BYTES or begin + size > kv[0]:
                report.bad["missing" if kv is None else "length"] += 1
                continue
            good.append(self.disk.read_record(number, offset, num_bytes))
            taken.append((begin, round_up(size)))
            report.unsealed += 1
        for header, record in self._good(number, scanned.records.select(scanned.records.is_ours)):
            good.append(record)
            taken.append((header.payload_offset, round_up(header.payload_bytes)))
            report.ok += 1
            report.ok_bytes += header.payload_bytes
            of_form = report.forms.setdefault(str(header.form), [0, 0])
            of_form[0] += 1
            of_form[1] += header.payload_bytes
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

    def _good(self, number: int, records: ScannedRecords) -> Iterator[tuple[Header, bytes]]:
        for offset, num_bytes in zip(records.offsets.tolist(), records.record_bytes.tolist(), strict=True):
            try:
                record = self.disk.read_record(number, offset, num_bytes)
                header, _ = decode(record, key=self._key)
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
            check_arriving(header, arriving, self._key)
