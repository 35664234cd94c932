"""Checks a profile store without changing it, and saves what can be read of a damaged one."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sglang_evicpress.profiler.database import (
    StoreDamaged,
    StoreError,
    connect,
    examine,
    lock,
    read_profile,
    real_path,
    reserve,
    sync_folder,
    unlock,
    unusable,
    worded,
    write_beside,
)
from sglang_evicpress.profiler.salvage import PAGE_BYTES, Found, Row, checksum

_SIDE_FILES = ("-journal", "-wal", "-shm")  # the last two only if someone turned the file's journal mode over


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Profiles in the file now, profiles that it is known to have had besides, and where the damaged file is kept:
    None when nothing was wrong, and nothing was changed."""

    num_kept: int
    num_lost: int
    bad_copy: Path | None


def check(path: Path) -> int:
    """How many profiles the file has, of all models, every one of them read; changes nothing.

    Raises StoreDamaged, StoreError, and ValueError when there is no such file.
    """
    path = _existing(path)
    try:
        count = _count(path, may_write=False)
        with closing(connect(path, may_write=True)) as connection, worded(path, "read"):
            reserve(path, connection)
            connection.execute("ROLLBACK")
        return count
    except StoreError as error:
        if getattr(error.__cause__, "sqlite_errorcode", None) != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
    try:
        with _copy(path) as copied:  # a put was killed, and undoing what it did would change the file
            return _count(copied, may_write=True)
    except StoreDamaged as error:
        raise StoreDamaged(str(error).replace(str(copied), str(path))) from error
    except OSError as error:
        raise StoreError(f"profile store {path} cannot be checked ({error.strerror})") from error


def repair(path: Path) -> RepairReport:
    """Put a new file with all profiles that can be read in the place of a damaged one, which becomes NAME.bad.

    Raises StoreError while a server has the file open, and ValueError when there is no such file. Programs other than
    ours are not noticed.
    """
    path = _existing(path)
    try:
        lock_fd = lock(path, alone=True)
        try:
            return RepairReport(check(path), 0, None)
        except StoreDamaged:
            return _repair(path)
        finally:
            unlock(lock_fd)
    except OSError as error:
        raise StoreError(f"profile store {path} cannot be repaired ({error.strerror})") from error


def _repair(path: Path) -> RepairReport:
    found = _salvage(path)
    rows = []
    for sequence, row in enumerate(sorted(found.rows.values()), start=1):
        rows.append(row._replace(sequence=sequence, checksum=checksum(sequence, row.identity, row.key, row.payload)))
    fresh = write_beside(path, rows)
    try:
        status = path.stat()
        fresh.chmod(status.st_mode & 0o777)
        with suppress(PermissionError):
            os.chown(fresh, status.st_uid, status.st_gid)
        bad = _bad_name(path)
        try:
            bad.hardlink_to(path)
        except OSError:  # not every file system has links
            _copy_file(path, bad)
        for side in _SIDE_FILES:  # else SQLite would undo in the new file what was done in the old one
            with suppress(FileNotFoundError):
                path.with_name(path.name + side).rename(bad.with_name(bad.name + side))
        sync_folder(path)
        fresh.replace(path)
        sync_folder(path)
    finally:
        fresh.unlink(missing_ok=True)
    return RepairReport(check(path), found.num_lost, bad)


def _salvage(path: Path) -> Found:
    """From the file as it lies there, and as it is when SQLite has undone or finished what is in its journal."""
    found = Found()
    found.scan(_pages(path))
    if any(path.with_name(path.name + side).exists() for side in _SIDE_FILES):
        with suppress(OSError), _copy(path) as copied:
            with suppress(StoreError, ValueError):
                _count(copied, may_write=True)
            found.scan(_pages(copied))
    for name, row in list(found.rows.items()):
        try:
            read_profile(path, row)
        except StoreDamaged:
            found.give_up(name)
    return found


def _count(path: Path, *, may_write: bool) -> int:
    with closing(connect(path, may_write=may_write)) as connection, worded(path, "read"):
        connection.execute("BEGIN")
        examine(path, connection)
        count = 0
        for row in connection.execute("SELECT * FROM profiles NOT INDEXED"):
            read_profile(path, Row(*row))
            count += 1
        return count


def _existing(path: Path) -> Path:
    try:
        real = real_path(path)
        if not real.exists():
            raise ValueError(f"profile store {path} is not there: expected the path of a file")
    except OSError as error:
        raise unusable(path, error.strerror) from error
    return real


def _bad_name(path: Path) -> Path:
    """NAME.bad, or NAME.bad-2, ... ."""
    bad, count = path.with_name(f"{path.name}.bad"), 1
    while os.path.lexists(bad):
        count += 1
        bad = path.with_name(f"{path.name}.bad-{count}")
    return bad


@contextmanager
def _copy(path: Path) -> Iterator[Path]:
    """A copy of the file and its journal, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / path.name
        for side in ("", "-journal", "-wal"):
            with suppress(FileNotFoundError):
                _copy_file(path.with_name(path.name + side), copied.with_name(copied.name + side))
        yield copied


def _copy_file(path: Path, other: Path) -> None:
    """With its holes: a damaged journal may have made the file of any length."""
    with path.open("rb", buffering=0) as file, other.open("xb", buffering=0) as copied:
        for offset in _data(file.fileno()):
            os.pwrite(copied.fileno(), os.pread(file.fileno(), PAGE_BYTES, offset), offset)
        copied.truncate(os.fstat(file.fileno()).st_size)


def _data(fd: int) -> Iterator[int]:
    """The offsets of the pages that are no holes."""
    end, size = 0, os.fstat(fd).st_size
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield from range(begin // PAGE_BYTES * PAGE_BYTES, end, PAGE_BYTES)


def _pages(path: Path) -> dict[int, bytes]:
    """All pages that the disk gives, by their number, which counts from 1."""
    pages = {}
    with path.open("rb", buffering=0) as file:
        for offset in _data(file.fileno()):
            with suppress(OSError):
                page = os.pread(file.fileno(), PAGE_BYTES, offset)
                pages[offset // PAGE_BYTES + 1] = page.ljust(PAGE_BYTES, b"\0")
    return pages
