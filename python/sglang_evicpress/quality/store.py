"""The profiles on disk: a log of lines, each with a checksum of its own. Every put that returned survives a kill.

The first line names the format. A beginning of a line at the end is one that a kill cut off, and counts as never put;
anything else that is not what was written is damage. Every open store locks ``NAME.lock`` shared, a repair alone.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from sglang_evicpress.quality.log_format import (
    HEADER,
    Live,
    Name,
    StoreError,
    line_of,
    live_of,
    profile_of,
    size_of_lines,
    text_of,
)
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tiers.entry.identity import KEY_BYTES

MAX_MODELS = 4
"""A file keeps as many profiles as so many full models have."""

SPARE_LINES = 256
"""Outdated lines, besides as many as there are valid ones, before the file is written anew without them."""


class ProfileStore:
    """The profiles of one model, at most ``max_profiles``, the oldest put of which makes room.

    ``identity`` (16 bytes) is that of the model, the tokenizer and the version of the forms: profiles of others may
    be in the file, are never returned, and go only when they are the oldest of very many. Several processes may have
    one file open; when it is taken away, or with its folder, and a file can be made there again, it gets what it had.
    Thread-safe.
    """

    def __init__(self, path: Path, identity: bytes, max_profiles: int = 10_000) -> None:
        """Open the file, or make it and its folder, and check it through.

        Raises ValueError when ``path`` cannot be such a file, StoreDamaged, and StoreError while a repair is at it.
        """
        if len(identity) != KEY_BYTES:
            raise ValueError(f"identity has {len(identity)} bytes: expected {KEY_BYTES}")
        if max_profiles < 1:
            raise ValueError(f"max_profiles is {max_profiles}: expected at least 1")
        self._identity = identity.hex()
        self._max_profiles = max_profiles
        self._turn = threading.Lock()
        self._path = real_path(path)
        self._lock_fd = self._fd = -1
        self._is_closed = False
        self._live: Live = {}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                self._live, self._num_lines = self._read()
                if self._num_lines == 0:
                    self._cut_tail()
        except OSError as error:
            self.close()
            raise ValueError(f"profile store {path} cannot be used ({error.strerror}): expected a file") from error
        except BaseException:
            self.close()
            raise

    def load(self) -> list[Profile]:
        """All profiles of this model, the oldest put first. Raises StoreError."""
        with self._turn, self._worded("read"), self._alone():
            self._live, self._num_lines = self._read()
            own = [line for name, line in self._live.items() if name.identity == self._identity]
        return [profile_of(self._path, line) for line in own[-self._max_profiles :]]

    def put(self, profile: Profile) -> None:
        """Keep ``profile`` in place of any of the same context; it is on the disk when this returns.

        Raises StoreError when it could not be kept, and ValueError for a profile that would not read back as it is.
        """
        line = line_of({"identity": self._identity, "profile": profile.to_json()})
        if Profile.from_json(orjson.loads(text_of(line))["profile"]) != profile:
            raise ValueError(f"profile {profile.key.hex()} would not read back as it is: expected finite figures")
        with self._turn, self._worded("written"), self._alone():
            end = self._cut_tail()
            try:
                if os.write(self._fd, line) != len(line):
                    raise OSError(0, "the disk took a part of it")
                os.fsync(self._fd)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, end)
                raise
            name = Name(self._identity, profile.key.hex())
            self._live.pop(name, None)
            self._live[name] = line
            self._num_lines += 1
            if self._num_lines > 2 * len(self._live) + SPARE_LINES or len(self._live) > self._max_lines:
                self._rewrite()

    def close(self) -> None:
        """Nothing can be put or loaded any more. Closing again does nothing."""
        with self._turn:
            self._is_closed = True
            self._leave()

    @property
    def _max_lines(self) -> int:
        """Contexts that the file may hold before the oldest make room: some more than are returned."""
        return max(self._max_profiles + SPARE_LINES, MAX_MODELS * self._max_profiles)

    def _enter(self) -> None:
        """Open the file that is there now, and lock it. One that was emptied or taken away gets back what it had."""
        while True:
            if self._lock_fd < 0:
                self._lock_fd = lock(self._path, alone=False)
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            is_locked = _is_at(_lock_path(self._path), self._lock_fd)
            if is_locked and _is_at(self._path, self._fd):
                if os.fstat(self._fd).st_size or not self._live:
                    return
                replace(self._path, self._live.values())
                self._num_lines = len(self._live) + 1
            self._leave(with_lock=not is_locked)

    def _leave(self, *, with_lock: bool = True) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if with_lock and self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process changes the file; whoever rewrote it put another in its place."""
        if self._is_closed:
            raise StoreError(f"profile store {self._path} is closed")
        try:
            self._enter()
        except BaseException:
            self._leave()  # to be opened again the next time
            raise
        try:
            yield
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def _worded(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"profile store {self._path} cannot be {done} ({error.strerror})") from error

    def _read(self) -> tuple[Live, int]:
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        return live_of(self._path, data)

    def _cut_tail(self) -> int:
        """Take off what a kill left of a line, and see that there is a first one; the file's size then. Raises
        StoreDamaged, and leaves the file alone, when that is nothing of ours."""
        header = line_of(HEADER)
        size = os.fstat(self._fd).st_size
        if os.pread(self._fd, len(header), 0) != header or os.pread(self._fd, 1, size - 1) != b"\n":
            size = size_of_lines(self._path, os.pread(self._fd, size, 0))
            os.ftruncate(self._fd, size)
        if size == 0:
            size = os.write(self._fd, header)
            os.fsync(self._fd)
        return size

    def _rewrite(self) -> None:
        """Leave out what was replaced, and the oldest where there are too many."""
        live, _ = self._read()
        own = [name for name in live if name.identity == self._identity]
        gone = set(own[: -self._max_profiles])
        left = [name for name in live if name not in gone]
        left = left[-MAX_MODELS * self._max_profiles :]
        replace(self._path, (live[name] for name in left))
        self._live = {name: live[name] for name in left}
        self._num_lines = len(left) + 1
        self._leave(with_lock=False)  # another file is there now


def real_path(path: Path) -> Path:
    """Without links. Raises ValueError for what is no file."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        raise ValueError(f"profile store {path} is a {'folder' if real.is_dir() else 'device'}: expected a file")
    return real


def lock(path: Path, *, alone: bool) -> int:
    """A descriptor that holds the lock beside the file until it is closed. Raises StoreError when it is taken."""
    fd = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        why = "a server has it open: stop it first" if alone else "it is being repaired"
        raise StoreError(f"profile store {path} cannot be used now: {why}") from None
    return fd


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _is_at(path: Path, fd: int) -> bool:
    """True if ``fd`` is still the file that is there."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(fd))


def replace(path: Path, lines: Iterable[bytes]) -> None:
    """Put a file of the header and ``lines`` in the place of ``path``, at once and for good. Raises OSError."""
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent, delete=False) as file:
        written = Path(file.name)
        try:
            file.write(line_of(HEADER))
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
