"""Folders and files of the SSD tier that nobody else can have prepared or swapped.

A folder is opened once and checked; everything in it is then opened relative to that descriptor, without following
links. What is not a plain file of this user alone is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would keep its opener waiting
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # a link, a pipe or socket, a folder
_WRITABLE_BY_OTHERS = 0o022


class StoreError(Exception):
    """A folder that cannot be used: one sentence that names it and says why."""


class NotAllowedError(StoreError):
    """A folder that may not be used, whatever is there."""


class UnsafeFileError(OSError):
    """Something that is not a plain file of this user alone."""


class Folder:
    """An open folder of this user alone; ``fd`` is its descriptor, open for as long as anyone holds this object."""

    __slots__ = ("__weakref__", "fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def open(cls, path: Path, *, root: str | None = None, is_made: bool = True) -> Folder:
        """The folder at ``path``; with ``is_made`` what is missing of the path is made, mode 0700.

        Links are followed above the folder, or above ``root``, a folder the path lies in, where that is given. Raises
        StoreError.
        """
        where = os.path.abspath(path)  # noqa: PTH100 - links are looked at below
        top, names = _split(where) if root is None else (root, _below(where, root))
        try:
            fd = os.open(top, _FOLDER_FLAGS)
        except OSError as error:
            raise _refusal(where, error, "made" if names else "opened") from error
        return cls._below(where, fd, names, is_made)

    def child(self, name: str, *, is_made: bool = True) -> Folder:
        """The folder ``name`` in this one, made where it is missing. Raises StoreError."""
        return self._below(f"{self.path}/{name}", os.dup(self.fd), [name], is_made)

    @classmethod
    def _below(cls, path: str, fd: int, names: Sequence[str], is_made: bool) -> Folder:
        """The folder ``path``, reached by these names from that of ``fd``, which is closed."""
        try:
            for name in names:
                fd = _enter(fd, name, is_made=is_made)
        except OSError as error:
            raise _refusal(path, error, "made" if is_made else "opened") from error
        folder = cls(path, fd)
        folder._check()
        return folder

    def _check(self) -> None:
        status, user = os.fstat(self.fd), os.geteuid()
        if status.st_uid != user:
            raise StoreError(
                f"SSD folder {self.path} belongs to user {status.st_uid}: expected one of user {user} "
                f"(chown {user} {self.path}, or name another)"
            )
        if status.st_mode & _WRITABLE_BY_OTHERS:
            raise StoreError(
                f"SSD folder {self.path} can be written by others (mode 0{stat.S_IMODE(status.st_mode):o}): expected "
                f"one that only its owner can (chmod go-w {self.path}, or name a folder in it that is not there yet)"
            )


def open_file(name: str, flags: int, folder_fd: int | None = None) -> int:
    """A descriptor, which children do not inherit, of a plain file that this user (or root) owns, that nobody else can
    write and that has one name. Raises UnsafeFileError for any other, without having changed or waited for it."""
    try:
        fd = os.open(name, flags | _FILE_FLAGS, 0o600, dir_fd=folder_fd)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _unsafe(name, "is not a plain file") from error
        raise
    try:
        _check_file(fd, name)
    except OSError:
        os.close(fd)
        raise
    return fd


def allowed_root(folder: str, roots: Sequence[str]) -> str:
    """The first of ``roots`` (absolute folders), links resolved, in which ``folder`` lies. Raises NotAllowedError."""
    if not roots:
        raise NotAllowedError(
            f"SSD folder {folder} is not allowed: expected a server that was started with --kv-ssd-dir or "
            "--kv-ssd-allow-dir"
        )
    real = os.path.realpath(folder)
    for root in roots:
        top = os.path.realpath(root)
        if os.path.commonpath([real, top]) == top:
            return top
    raise NotAllowedError(
        f"SSD folder {folder} is not allowed: expected one in {' or '.join(roots)}, as the parent of --kv-ssd-dir and "
        "--kv-ssd-allow-dir say"
    )


def allowed_roots(ssd_dir: str | None, allow_dirs: Sequence[str]) -> list[str]:
    """Folders below which one may be attached at run time: the parent of ``ssd_dir``, or itself if that is ``/``, and
    ``allow_dirs``."""
    roots = []
    if ssd_dir is not None:
        real = os.path.realpath(ssd_dir)
        parent = os.path.dirname(real)  # noqa: PTH120 - paths are plain texts here
        roots.append(real if parent == os.sep else parent)
    return [*roots, *allow_dirs]


def _split(path: str) -> tuple[str, list[str]]:
    """The deepest folder above ``path`` that is there, links resolved, and the names that lead from it."""
    parent, name = os.path.split(path)
    top = os.path.realpath(parent)
    names = [name] if name else []
    while not os.path.lexists(top):
        top, name = os.path.split(top)
        names.insert(0, name)
    return top, names


def _below(path: str, root: str) -> list[str]:
    relative = os.path.relpath(os.path.realpath(path), root)
    return list(Path(relative).parts)


def _enter(fd: int, name: str, *, is_made: bool) -> int:
    """The folder ``name`` in that of ``fd``, which is closed."""
    try:
        if name in (os.curdir, os.pardir, os.sep):  # a link above was moved meanwhile
            raise OSError(errno.EPERM, "it lies elsewhere by now")
        if is_made:
            with contextlib.suppress(FileExistsError):  # it is opened, and checked if it is the one that is wanted
                os.mkdir(name, 0o700, dir_fd=fd)
        try:
            return os.open(name, _FOLDER_FLAGS, dir_fd=fd)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, name) from None
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
    finally:
        os.close(fd)


def _refusal(path: str, error: OSError, what: str) -> StoreError:
    if error.errno == errno.ELOOP:
        return StoreError(
            f"SSD folder {path} is a symbolic link: expected the folder itself, which is {os.path.realpath(path)}"
        )
    return StoreError(f"SSD folder {path} cannot be {what}: {error.strerror}")


def _check_file(fd: int, name: str) -> None:
    status, user = os.fstat(fd), os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        why = "is not a plain file"
    elif status.st_uid not in (user, 0):
        why = f"belongs to user {status.st_uid}"
    elif status.st_mode & _WRITABLE_BY_OTHERS:
        why = f"can be written by others (mode 0{stat.S_IMODE(status.st_mode):o})"
    elif status.st_nlink > 1:
        why = f"has {status.st_nlink} names"
    elif status.st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)  # removed since it was opened
    else:
        return
    raise _unsafe(name, why)


def _unsafe(name: str, why: str) -> UnsafeFileError:
    return UnsafeFileError(errno.EPERM, f"{name} {why}: expected a plain file of user {os.geteuid()} alone")
