"""The SQLite file that profiles are kept in: how it is made, locked, opened, and recognised as whole.

Beside NAME lie NAME-journal, which SQLite keeps, and NAME.lock, which every open store locks shared and a repair
alone. The journal is a rollback journal that stays in place between puts, not a write-ahead log: of a damaged log
SQLite silently forgets the last puts, whereas here they are all in NAME, where damage is seen.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import orjson

from sglang_evicpress.profiler.profile import Profile
from sglang_evicpress.profiler.salvage import PAGE_BYTES, Row

SCHEMA_VERSION = 1

BUSY_S = 10.0
"""For so long another process may hold the file before a call gives up."""

MAX_PAGES = 1 << 24
"""64 GiB: a damaged header may claim, and a damaged journal may make, a file of far more that is mostly holes."""

INSERT = "INSERT INTO profiles VALUES (?, ?, ?, ?, ?)"

_APPLICATION_ID = 0x45564350  # "EVCP"
_TABLE = """CREATE TABLE profiles (
    sequence INTEGER PRIMARY KEY,
    identity BLOB NOT NULL,
    key BLOB NOT NULL,
    payload BLOB NOT NULL,
    checksum BLOB NOT NULL
)"""
_INDEX = "CREATE UNIQUE INDEX by_key ON profiles (identity, key)"
_SCHEMA = [(b"table", b"profiles", b"profiles", _TABLE.encode()), (b"index", b"by_key", b"profiles", _INDEX.encode())]
_REFUSED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)


class StoreError(Exception):
    """The store cannot be used; one sentence names its file and says why."""


class StoreDamaged(StoreError):
    """What the file holds is not what was put there, or it is no profile store; a repair saves what it can."""


def real_path(path: Path) -> Path:
    """Without links, so that what SQLite opens and what is replaced is the same file. Raises OSError, and ValueError
    for what is no file."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        raise ValueError(f"profile store {path} is a {'folder' if real.is_dir() else 'device'}: expected a file")
    return real


def unusable(path: Path, why: str | None) -> ValueError:
    return ValueError(f"profile store {path} cannot be used ({why}): expected a file that can be read and written")


def damaged(path: Path, why: str) -> StoreDamaged:
    return StoreDamaged(
        f"profile store {path} is damaged ({why}): `evicpress profile repair {path}` saves what can be read"
    )


def lock(path: Path, *, alone: bool) -> int:
    """Lock NAME.lock until the descriptor is given to ``unlock``. Raises OSError, and StoreError when it is taken.

    The lock file stays: whoever removed it would let a second process lock another one.
    """
    fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        holder = "is open in a server: stop it first" if alone else "is being repaired: try again later"
        raise StoreError(f"profile store {path} {holder}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock(fd: int) -> None:
    """Also when a forked child still has the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def connect(path: Path, *, may_write: bool) -> sqlite3.Connection:
    """An existing file, in autocommit mode, usable from any thread; text comes as bytes, as damaged text would not
    decode."""
    with worded(path, "opened"):
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode={'rw' if may_write else 'ro'}",
            uri=True,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.text_factory = bytes
        return connection


def open_to_write(path: Path) -> sqlite3.Connection:
    """The whole and writable file, made if it is not there. Raises ValueError, StoreDamaged or StoreError."""
    try:
        if not path.exists():
            _make(path)
    except OSError as error:
        raise unusable(path, error.strerror) from error
    connection = connect(path, may_write=True)
    try:
        with worded(path, "opened"):
            reserve(path, connection)
            examine(path, connection)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")  # fails if it can only be read
            connection.execute("ROLLBACK")
            (mode,) = connection.execute("PRAGMA journal_mode = PERSIST").fetchone()
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # a repair shall not find what was replaced long ago
        if mode != b"persist":
            raise StoreError(f"profile store {path} cannot be opened (another program keeps its journal mode {mode!r})")
    except BaseException:
        connection.close()
        raise
    return connection


def examine(path: Path, connection: sqlite3.Connection) -> None:
    """All but the rows' checksums. Raises StoreDamaged or sqlite3.Error."""
    connection.execute("PRAGMA cell_size_check = ON")
    if number(connection, "PRAGMA application_id") != _APPLICATION_ID:
        raise damaged(path, "it is no profile store")
    if (version := number(connection, "PRAGMA user_version")) != SCHEMA_VERSION:
        raise damaged(path, f"its schema has version {version}, {SCHEMA_VERSION} is known")
    if connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall() != _SCHEMA:
        raise damaged(path, "its schema is another one")
    if (num_pages := number(connection, "PRAGMA page_count")) > MAX_PAGES:
        raise damaged(path, f"it has {num_pages} pages")
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != b"ok":
        raise damaged(path, verdict.decode("utf-8", "replace"))


def reserve(path: Path, connection: sqlite3.Connection) -> None:
    """Begin the first transaction of a connection: one that may write, or, where the file may only be read, one that
    reads. Raises sqlite3.Error, and StoreDamaged when SQLite will not write to the file because of its header."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_READONLY:
            raise damaged(path, "its header has a format version that SQLite only reads") from error
        raise


def read_profile(path: Path, row: Row) -> Profile:
    """Raises StoreDamaged."""
    if not row.is_good:
        raise damaged(path, f"row {row.sequence} has another checksum")
    try:
        profile = Profile.from_json(orjson.loads(row.payload))
    except ValueError as error:
        raise damaged(path, f"row {row.sequence}: {error}") from error
    if profile.key != row.key:
        raise damaged(path, f"row {row.sequence} has key {row.key.hex()} and the profile of {profile.key.hex()}")
    return profile


@contextmanager
def worded(path: Path, done: str) -> Iterator[None]:
    """Says SQLite's errors as ours: StoreError, StoreDamaged, and ValueError for a file that cannot be opened."""
    try:
        yield
    except UnicodeDecodeError as error:  # of a message in which SQLite quotes what it found
        raise damaged(path, "SQLite cannot say how") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)  # none when the connection is closed
        if code is not None and code & 0xFF in _REFUSED and done == "opened":
            raise unusable(path, str(error)) from error
        if code is None or code & 0xFF in (*_REFUSED, *_PASSING):
            raise StoreError(f"profile store {path} cannot be {done} ({error})") from error
        raise damaged(path, str(error)) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """On the disk when it ends; undone by any exception."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # some failures have undone it already
            connection.execute("ROLLBACK")
        raise


def number(connection: sqlite3.Connection, query: str, *given: bytes) -> int:
    """The one whole number that ``query`` asks for."""
    (answer,) = connection.execute(query, given).fetchone()
    return int(answer)


def write_beside(path: Path, rows: Iterable[Row]) -> Path:
    """A whole file with these rows, on the disk, in the folder of ``path``; the caller gives it a name."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        with transaction(connection):
            connection.execute(_TABLE)
            connection.execute(_INDEX)
            connection.executemany(INSERT, rows)
        image = connection.serialize()
    fd, name = tempfile.mkstemp(".part", f"{path.name}.", path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(image)
            file.flush()
            os.fsync(fd)
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def sync_folder(path: Path) -> None:
    """The names in the folder of ``path`` are on the disk."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make(path: Path) -> None:
    """An empty store appears all at once, so that an empty file is never a young store; another's stays."""
    fresh = write_beside(path, [])
    try:
        path.hardlink_to(fresh)
    except FileExistsError:
        return
    except OSError:  # not every file system has links
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path)
