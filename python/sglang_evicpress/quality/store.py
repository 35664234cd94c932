"""The profiles on disk: one SQLite database. Every put that returned survives a kill and a power failure."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import orjson
import xxhash

from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tiers.entry.identity import KEY_BYTES

logger = logging.getLogger(__name__)

MAX_MODELS = 4
"""A file keeps as many profiles as so many full models have."""

APPLICATION_ID, VERSION = 0x45765072, 1
_WAIT_S = 10.0  # for another process that writes
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE profiles (
    number INTEGER PRIMARY KEY, identity BLOB, key BLOB, profile BLOB, checksum BLOB, UNIQUE (identity, key)
);
CREATE INDEX by_model ON profiles (identity, number);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class StoreError(Exception):
    """The store cannot be used; one sentence names its file and says why."""


class ProfileStore:
    """The profiles of one model, at most ``max_profiles``, the oldest put of which makes room.

    ``identity`` (16 bytes) is that of the model, the tokenizer and the version of the forms: profiles of others may
    be in the file, are never returned, and go only when they are the oldest of very many. Several processes may use one
    file, which is open only while it is read or written.
    """

    def __init__(self, path: Path, identity: bytes, max_profiles: int = 10_000) -> None:
        """Check the file through, or make it and its folder. A damaged store becomes NAME.bad. Raises ValueError when
        it cannot be used, and for a file that is no profile store, which stays as it is."""
        if len(identity) != KEY_BYTES:
            raise ValueError(f"identity has {len(identity)} bytes: expected {KEY_BYTES}")
        if max_profiles < 1:
            raise ValueError(f"max_profiles is {max_profiles}: expected at least 1")
        self._identity, self._max_profiles = identity, max_profiles
        self._path = _real_path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            has_content = self._path.exists() and self._path.stat().st_size > 0
            if has_content and (kind := _other_kind(self._path)):
                raise ValueError(f"profile store {path} is {kind}: expected a file that a server made, or none yet")
            if has_content and (problem := _problem(self._path)):
                logger.warning("profile store %s is set aside as %s: %s", self._path, _set_aside(self._path), problem)
            with self._open("used"):
                pass
        except (OSError, StoreError) as error:
            why = error.strerror if isinstance(error, OSError) else error.__cause__
            raise ValueError(f"profile store {path} cannot be used ({why}): expected a file") from error

    def load(self) -> list[Profile]:
        """All profiles of this model, the oldest put first. Raises StoreError."""
        query = "SELECT profile, checksum FROM profiles WHERE identity = ? ORDER BY number DESC LIMIT ?"
        with self._open("read") as database:
            rows = database.execute(query, (self._identity, self._max_profiles)).fetchall()
        return [profile for row in reversed(rows) if (profile := _profile(self._path, *row)) is not None]

    def put(self, profile: Profile) -> None:
        """Keep ``profile`` in place of any of the same context; it is on the disk when this returns.

        Raises StoreError when it could not be kept, and ValueError for a profile that would not read back as it is.
        """
        text = orjson.dumps(profile.to_json(), option=orjson.OPT_SERIALIZE_NUMPY)
        if Profile.from_json(orjson.loads(text)) != profile:
            raise ValueError(f"profile {profile.key.hex()} would not read back as it is: expected finite figures")
        surplus = "DELETE FROM profiles WHERE number IN (SELECT number FROM profiles {} ORDER BY number DESC LIMIT -1 "
        with self._open("written") as database:
            row = (self._identity, profile.key, text, xxhash.xxh3_128_digest(text))
            database.execute(
                "INSERT OR REPLACE INTO profiles (identity, key, profile, checksum) VALUES (?, ?, ?, ?)", row
            )
            one, all_ = (surplus.format(where) + "OFFSET ?)" for where in ("WHERE identity = ?", ""))
            database.execute(one, (self._identity, self._max_profiles))
            database.execute(all_, (MAX_MODELS * self._max_profiles,))

    @contextmanager
    def _open(self, done: str) -> Iterator[sqlite3.Connection]:
        """One transaction, in a file that is made where there is none. Raises StoreError."""
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as database:
                if self._path.stat().st_size == 0:
                    _make(database)
                database.execute("PRAGMA synchronous = EXTRA")
                with database:
                    yield database
        except (sqlite3.Error, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise StoreError(f"profile store {self._path} cannot be {done} ({why})") from error


def _make(database: sqlite3.Connection) -> None:
    try:
        database.executescript(_SCHEMA)
    except sqlite3.OperationalError as error:  # another process was faster
        if "already exists" not in str(error):
            raise
        database.rollback()


def _profile(path: Path, text: bytes, checksum: bytes) -> Profile | None:
    try:
        if xxhash.xxh3_128_digest(text) == checksum:
            return Profile.from_json(orjson.loads(text))
    except (TypeError, ValueError):
        pass
    logger.warning("profile store %s: a profile does not match its checksum and is left out", path)
    return None


def _other_kind(path: Path) -> str:
    """The kind of a file that is no profile store, by SQLite's header (its file format, section 1.3); else empty.
    Raises OSError."""
    with path.open("rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3\0"):
        return "no database"
    version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if application != APPLICATION_ID:
        return "a database of something else"
    return "" if version == VERSION else f"of version {version}, not {VERSION}"


def _problem(path: Path) -> str:
    """Damage that SQLite finds; empty for a whole store. Raises StoreError, OSError."""
    try:  # not read-only: SQLite first takes back what a kill left unfinished
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=_WAIT_S)) as database:
            told = str(database.execute("PRAGMA integrity_check").fetchone()[0])
            return "" if told == "ok" else " ".join(told.split())
    except sqlite3.OperationalError as error:
        raise StoreError(f"profile store {path} cannot be read ({error})") from error
    except sqlite3.DatabaseError as error:
        return str(error)


def _set_aside(path: Path) -> Path:
    """Rename the file, and with it the journal that belongs to it."""
    number = 0
    while (name := path.with_name(f"{path.name}.bad{number or ''}")).exists():
        number += 1
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists():
        journal.rename(name.with_name(f"{name.name}-journal"))
    return path.rename(name)


def _real_path(path: Path) -> Path:
    """Without links. Raises ValueError for what is no file."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        raise ValueError(f"profile store {path} is a {'folder' if real.is_dir() else 'device'}: expected a file")
    return real
