"""Segments on disk: ``segment-NNNNNN.kv`` holds payloads, ``segment-NNNNNN.head`` the records that publish them.

Both only grow. Payloads begin on block boundaries, in any order and with gaps; a payload without a record is garbage. A
record of an entry publishes it; a tombstone, appended later, says that the record at some byte of the file is garbage.
Space inside a segment is given back by punching holes and never used again, so a reader that races with a removal
reads zeros, or no file, and not another entry.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

from sglang_evicpress.tiers.entry.header import BadEntry, Header, check_part
from sglang_evicpress.tiers.entry.key import SEAL_BYTES, Key
from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES, Aligned, Files, parts, round_up, transfer
from sglang_evicpress.tiers.ssd.scan import Head, scan

PIECE_BYTES = 8 << 20
"""Of a payload that is read: one piece is checked while the next ones arrive."""

_READ_AHEAD = 2  # pieces
_HEAD_PIECE_BYTES = 1 << 20
_LEFTOVER = ".new"
_NAME = re.compile(r"segment-(\d{6,9})\.(kv|head)")


class SegmentFiles:
    """Reads and writes the segments of one folder. Every call opens what it needs, so nothing is left open."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._has_direct = True
        self._readers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def numbers(self) -> list[int]:
        """Numbers of the segments that have a file, ascending."""
        return sorted({int(match[1]) for name in self._files.names() if (match := _NAME.fullmatch(name))})

    def sizes(self, number: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Size and allocated bytes of the .kv and of the .head file; None for a file that is not there."""
        return self._files.stat(self._kv(number)), self._files.stat(self._head(number))

    def write_payload(self, number: int, offset: int, chunks: Sequence[memoryview]) -> None:
        """Raises OSError, also when less than all could be written."""
        aligned = Aligned(chunks)
        aligned.fill_tail()
        expected = sum(map(len, aligned.buffers))
        with self._payload(number, os.O_RDWR | os.O_CREAT, aligned.is_direct) as file:
            done = file.run(lambda fd: transfer(self._files.pwritev, fd, aligned.buffers, offset))
        if done != expected:
            raise OSError(errno.EIO, f"{done} of {expected} bytes could be written")

    def read_payload(
        self, number: int, offset: int, chunks: Sequence[memoryview]
    ) -> Generator[Sequence[memoryview], None, None]:
        """Fill the chunks; yields the pieces of them that have arrived, in order, while more are read.

        Raises OSError, and BadEntry("length") where the file ends before.
        """
        aligned = Aligned(chunks)
        if not aligned.num_bytes:
            return
        total = sum(map(len, aligned.buffers))
        sizes = (min(PIECE_BYTES, total - at) for at in range(0, total, PIECE_BYTES))
        groups = [list(part) for part in parts(aligned.buffers, sizes)]
        with self._payload(number, os.O_RDONLY, aligned.is_direct) as file:

            def read(group: Sequence[memoryview], at: int) -> None:
                done = file.run(lambda fd: transfer(self._files.preadv, fd, group, at))
                if done != sum(map(len, group)):
                    raise BadEntry("length", f"the file ends {done} bytes behind {at}")

            pending: list[Future[None]] = []
            try:
                for index, group in enumerate(groups):
                    if len(groups) == 1:
                        read(group, offset)
                    else:
                        while len(pending) < len(groups) and len(pending) <= index + _READ_AHEAD:
                            ahead = len(pending)
                            pending.append(self._pool().submit(read, groups[ahead], offset + ahead * PIECE_BYTES))
                        pending[index].result()
                    if index == len(groups) - 1:
                        yield aligned.take_tail(group)
                    else:
                        yield group
            finally:
                for future in pending:
                    if not future.cancel():
                        future.exception()  # waits: the descriptor and the chunks are in use until then

    def read_part(self, number: int, offset: int, num_bytes: int) -> memoryview:
        """These bytes of what payloads lie in, wherever they begin: the blocks around them are read. Raises as
        ``read_payload``."""
        begin = offset // BLOCK_BYTES * BLOCK_BYTES
        if not num_bytes:
            return memoryview(b"")
        blocks = memoryview(mmap.mmap(-1, round_up(offset + num_bytes) - begin))
        for _ in self.read_payload(number, begin, [blocks]):
            pass
        return blocks[offset - begin :][:num_bytes]

    def append(self, number: int, record: bytes, *, is_new: bool = True) -> tuple[int, int]:
        """Append a record; its offset and the file's size behind it. Not thread-safe.

        Raises OSError, and leaves no part of the record behind if it can. Without ``is_new`` the file has to be there.
        """
        files = self._files
        with files.opened(self._head(number), os.O_WRONLY | os.O_APPEND | (os.O_CREAT if is_new else 0)) as fd:
            offset = files.size(fd)
            try:
                done = files.append(fd, record)
                if done != len(record):
                    raise OSError(errno.ENOSPC, f"{done} of the {len(record)} bytes of a record could be written")
            except OSError:
                files.truncate(fd, offset)
                raise
        return offset, offset + len(record)

    def read_record(self, number: int, offset: int, num_bytes: int) -> bytes:
        """The bytes there, fewer at the end of the file. Raises OSError."""
        with self._files.opened(self._head(number), os.O_RDONLY) as fd:
            data = bytearray(num_bytes)
            return bytes(data[: self._read(fd, offset, memoryview(data))])

    def read_head(self, number: int, key: Key | None = None) -> Head:
        """Read and check every record; those that ``key`` has sealed are ours. What cannot be read counts as damaged,
        and the file as not whole."""
        with self._files.opened(self._head(number), os.O_RDONLY) as fd:
            num_bytes = self._files.size(fd)
            data, is_whole = bytearray(num_bytes), True
            view = memoryview(data)
            for begin in range(0, num_bytes, _HEAD_PIECE_BYTES):
                piece = view[begin : begin + _HEAD_PIECE_BYTES]
                try:
                    is_whole &= self._read(fd, begin, piece) == len(piece)
                except OSError:
                    is_whole = False
        return replace(scan(data, key), is_whole=is_whole)

    def cut(self, number: int, *, kv_bytes: int | None = None, head_bytes: int | None = None) -> None:
        """Shorten one of the files, or both, to these sizes. Raises OSError."""
        for path, size in ((self._kv(number), kv_bytes), (self._head(number), head_bytes)):
            if size is not None:
                with self._files.opened(path, os.O_WRONLY) as fd:
                    self._files.truncate(fd, size)

    def rewrite_head(self, number: int, records: Sequence[bytes]) -> None:
        """Replace the .head file, all at once, by one with these records. Raises OSError."""
        path = self._head(number)
        self._files.unlink(path + _LEFTOVER)
        with self._files.opened(path + _LEFTOVER, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL) as fd:
            for record in records:
                if self._files.append(fd, record) != len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._files.fdatasync(fd)
        self._files.rename(path + _LEFTOVER, path)

    def remove_leftovers(self) -> None:
        """Remove files of a ``rewrite_head`` that did not end. Raises OSError."""
        for name in self._files.names():
            if name.startswith("segment-") and name.endswith(_LEFTOVER):
                self._files.unlink(name)

    def data_bytes(self, number: int, holes: Sequence[tuple[int, int]]) -> int:
        """Bytes of these (offset, bytes) of a .kv file that take space. Raises OSError."""
        with self._files.opened(self._kv(number), os.O_RDONLY) as fd:
            return sum(self._files.data_bytes(fd, offset, num_bytes) for offset, num_bytes in holes)

    def punch(self, number: int, holes: Sequence[tuple[int, int]]) -> None:
        """Give back (offset, bytes) of a .kv file; one that is not there has none. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), self._files.opened(self._kv(number), os.O_WRONLY) as fd:
            for offset, num_bytes in merged(holes):
                self._files.punch_hole(fd, offset, num_bytes)

    def unlink(self, number: int) -> None:
        """The .head first: without it the payloads are garbage, all at once, whatever happens next. Raises OSError."""
        self._files.unlink(self._head(number))
        self._files.unlink(self._kv(number))

    def sync(self, number: int, *, is_payload: bool = True, is_head: bool = True, is_folder: bool = False) -> None:
        """Make what was written durable: payloads, then records, then the names of the files. Raises OSError."""
        for path, is_wanted in ((self._kv(number), is_payload), (self._head(number), is_head)):
            if is_wanted:
                with contextlib.suppress(FileNotFoundError), self._files.opened(path, os.O_RDONLY) as fd:
                    self._files.fdatasync(fd)
        if is_folder:
            self._files.sync_folder()

    def close(self) -> None:
        """End the reading threads once they are done."""
        with self._lock:
            readers, self._readers = self._readers, None
        if readers is not None:
            readers.shutdown()

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(4, "evicpress-ssd-read")
            return self._readers

    def _payload(self, number: int, flags: int, is_direct: bool) -> _Payload:
        return _Payload(self, self._files, self._kv(number), flags, is_direct and self._has_direct)

    def _read(self, fd: int, offset: int, buffer: memoryview) -> int:
        """Fill the buffer; the bytes read, fewer at the end of the file."""
        done = 0
        while done < len(buffer):
            moved = self._files.preadv(fd, [buffer[done:]], offset + done)
            if not moved:
                break
            done += moved
        return done

    def _kv(self, number: int) -> str:
        return f"segment-{number:06}.kv"

    def _head(self, number: int) -> str:
        return f"segment-{number:06}.head"


class _Payload:
    """An open .kv file, for direct I/O where the file system has it."""

    def __init__(self, owner: SegmentFiles, files: Files, path: str, flags: int, is_direct: bool) -> None:
        self._owner, self._files, self._path, self._flags = owner, files, path, flags
        self._lock = threading.Lock()
        self._buffered: int | None = None
        self._direct: int | None = None
        if is_direct:
            try:
                self._direct = files.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                owner._has_direct = False
        if self._direct is None:
            self._buffered = files.open(path, flags)

    def run(self, work: Callable[[int], int]) -> int:
        """Do it with a descriptor; once more, and buffered from now on, where direct I/O turns out not to work."""
        if self._direct is not None:
            try:
                return work(self._direct)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._owner._has_direct = False
        with self._lock:
            if self._buffered is None:
                self._buffered = self._files.open(self._path, self._flags)
        return work(self._buffered)

    def __enter__(self) -> _Payload:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._direct, self._buffered):
            if fd is not None:
                self._files.close(fd)


def merged(holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same (offset, bytes) in order, those that touch or overlap as one."""
    ranges: list[tuple[int, int]] = []
    for offset, num_bytes in sorted(holes):
        if ranges and offset <= sum(ranges[-1]):
            begin, size = ranges.pop()
            ranges.append((begin, max(size, offset + num_bytes - begin)))
        elif num_bytes:
            ranges.append((offset, num_bytes))
    return ranges


def gaps(taken: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Parts of [0, end) that are not in ``taken``, as (offset, bytes)."""
    ranges, at = [], 0
    for offset, num_bytes in merged(taken):
        if offset > at:
            ranges.append((at, offset - at))
        at = offset + num_bytes
    if at < end:
        ranges.append((at, end - at))
    return ranges


def check_arriving(header: Header, arriving: Iterator[Sequence[memoryview]], key: Key | None = None) -> None:
    """Compare every extent of the header with its bytes, as they arrive, and its seal with ``key``. Raises BadEntry."""
    payload = parts(chain.from_iterable(arriving), (extent.num_bytes for extent in header.extents))
    for number, (_, part) in enumerate(zip(header.extents, payload, strict=True)):
        check_part(header, number, part, seal_of(header, number, key))


def seal_of(header: Header, number: int, key: Key | None) -> tuple[Key, bytes] | None:
    """The key and what it has sealed an extent with; None without a key."""
    return None if key is None else (key, header.seals[number * SEAL_BYTES : (number + 1) * SEAL_BYTES])
