"""The only module that touches the operating system for the SSD tier, and whole transfers built on it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from sglang_evicpress.tiers.ssd.folder import Folder, StoreError, UnsafeFileError, open_file

BLOCK_BYTES = 4096
"""Payloads begin and end on multiples of this; direct I/O moves multiples of it from and to multiples of it."""

_MAX_BUFFERS = 1024  # of one preadv or pwritev, Linux's IOV_MAX
_PUNCH_KEEP_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


class Files:
    """Calls of the operating system, one method each; they raise OSError and nothing else. Thread-safe.

    Names are those of files in ``folder``; without one they are paths.
    """

    folder: Folder | None = None

    def open(self, path: str, flags: int) -> int:
        """A descriptor, which children do not inherit; new files are for their owner only. Raises UnsafeFileError for
        what is not a plain file of this user alone."""
        return open_file(path, flags, self._at)

    def close(self, fd: int) -> None:
        os.close(fd)

    @contextlib.contextmanager
    def opened(self, path: str, flags: int) -> Iterator[int]:
        """``open``, and ``close`` at the end."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def append(self, fd: int, data: bytes) -> int:
        """Write at the end of a file that was opened with O_APPEND; the bytes written may be fewer."""
        return os.write(fd, data)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self) -> None:
        """Make the names of new and removed files durable."""
        os.fsync(self._opened.fd)

    def punch_hole(self, fd: int, offset: int, num_bytes: int) -> None:
        """Give the blocks of this range back to the file system; they read as zeros. The file keeps its size."""
        if _LIBC.fallocate(fd, _PUNCH_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self._at)

    def rename(self, old: str, new: str) -> None:
        """Replace ``new``, if it is there."""
        os.replace(old, new, src_dir_fd=self._at, dst_dir_fd=self._at)

    def data_bytes(self, fd: int, offset: int, num_bytes: int) -> int:
        """Bytes of this range that are not a hole, in whole blocks of the file system."""
        num_data_bytes, end = 0, offset + num_bytes
        while offset < end:
            try:
                begin = os.lseek(fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no more data
                    break
                raise
            offset = os.lseek(fd, begin, os.SEEK_HOLE)
            num_data_bytes += max(0, min(offset, end) - begin)
        return num_data_bytes

    def stat(self, path: str) -> tuple[int, int] | None:
        """Size and allocated bytes, of a link itself; None where there is no such file."""
        try:
            status = os.stat(path, dir_fd=self._at, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_size, status.st_blocks * 512

    def names(self) -> list[str]:
        return os.listdir(self._opened.fd)  # noqa: PTH208 - names, not paths

    def free_bytes(self) -> tuple[int, int]:
        """Free bytes of the file system for this user, and its size."""
        status = os.fstatvfs(self._opened.fd)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    @property
    def _at(self) -> int | None:
        return None if self.folder is None else self.folder.fd

    @property
    def _opened(self) -> Folder:
        if self.folder is None:
            raise OSError(errno.EBADF, "there is no folder")
        return self.folder


def round_up(num_bytes: int) -> int:
    """To whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def lock_folder(folder: Folder) -> int:
    """Take a folder's ``lock`` for as long as the descriptor is open. Raises StoreError naming who holds it."""
    where = f"SSD folder {folder.path}"
    try:
        fd = open_file("lock", os.O_RDWR | os.O_CREAT, folder.fd)
    except OSError as error:
        what = error.strerror if isinstance(error, UnsafeFileError) else f"its file 'lock': {error.strerror}"
        raise StoreError(f"{where} cannot be locked: {what}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(f"{where} is in use by process {holder}: every server needs its own") from None
    except OSError as error:
        os.close(fd)
        raise StoreError(f"{where} cannot be locked: {error.strerror}") from error
    return fd


def unlock_folder(fd: int) -> None:
    """Give the lock back, also when a forked child still has the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class Aligned:
    """A payload's chunks as buffers that add up to whole blocks.

    The last chunk may be of any size: what is behind its last whole block goes through a block of our own. Direct
    I/O is possible where the chunks lie on block boundaries (``is_direct``).
    """

    def __init__(self, chunks: Sequence[memoryview]) -> None:
        self.num_bytes = sum(len(chunk) for chunk in chunks)
        self.buffers = [chunk for chunk in chunks if len(chunk)]
        self._tail: memoryview | None = None
        over = self.num_bytes % BLOCK_BYTES
        if over and len(self.buffers[-1]) >= over:
            last = self.buffers.pop()
            if len(last) > over:
                self.buffers.append(last[:-over])
            self._tail = last[-over:]
            self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
            self.buffers.append(self._block)
        elif over:
            self.buffers.append(memoryview(bytearray(BLOCK_BYTES - over)))
        self.is_direct = not any(_address(buffer) % BLOCK_BYTES or len(buffer) % BLOCK_BYTES for buffer in self.buffers)

    def fill_tail(self) -> None:
        """Before a write: the last bytes, with zeros behind them."""
        if self._tail is not None:
            self._block[: len(self._tail)] = self._tail

    def take_tail(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """After a read of the last ``buffers``: what of the payload is in them, without the padding."""
        if self._tail is not None:
            self._tail[:] = self._block[: len(self._tail)]
            return [*buffers[:-1], self._tail]
        return list(buffers[:-1] if self.num_bytes % BLOCK_BYTES else buffers)


def transfer(
    move: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview], offset: int
) -> int:
    """``preadv`` or ``pwritev`` until all is done or nothing more comes; the bytes moved, whole blocks of them."""
    done, left = 0, list(buffers)
    while left:
        moved = move(fd, left[:_MAX_BUFFERS], offset + done)
        is_last = moved == sum(map(len, left[:_MAX_BUFFERS])) and len(left) <= _MAX_BUFFERS
        if not is_last:
            moved -= moved % BLOCK_BYTES  # goes on where direct I/O can
        done += moved
        if is_last or not moved:
            break
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
    return done


def parts(buffers: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[Iterator[memoryview]]:
    """The buffers, one after the other, cut into parts of these sizes in bytes; each has to be taken before the next,
    and takes a buffer when it comes to it."""
    stream = iter(buffers)
    rest = memoryview(b"")

    def take(num_bytes: int) -> Iterator[memoryview]:
        nonlocal rest
        while num_bytes:
            if not rest:
                rest = next(stream)
            part = rest[:num_bytes]
            rest = rest[len(part) :]
            num_bytes -= len(part)
            yield part

    return map(take, sizes)


def reason_of(error: OSError) -> str:
    """Under which it is counted: "full" is the disk or the user's share of it, "unsafe" no plain file of this user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    if isinstance(error, UnsafeFileError):
        return "unsafe"
    if isinstance(error, TimeoutError):
        return "deadline"
    return "missing" if isinstance(error, FileNotFoundError) else "io"


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
