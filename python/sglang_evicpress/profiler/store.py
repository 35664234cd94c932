"""The profiles on disk: every put that returned survives a kill at any moment."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import orjson

from sglang_evicpress.profiler.database import (
    INSERT,
    StoreDamaged,
    StoreError,
    lock,
    number,
    open_to_write,
    read_profile,
    real_path,
    transaction,
    unlock,
    unusable,
    worded,
)
from sglang_evicpress.profiler.profile import Profile
from sglang_evicpress.profiler.repair import RepairReport, check, repair
from sglang_evicpress.profiler.salvage import Row, checksum
from sglang_evicpress.tiers.identity import KEY_BYTES

__all__ = ["MAX_MODELS", "ProfileStore", "RepairReport", "StoreDamaged", "StoreError", "check", "repair"]

MAX_MODELS = 4
"""A file keeps as many profiles as so many full models have."""


class ProfileStore:
    """The profiles of one model, at most ``max_profiles``, the oldest put of which makes room.

    ``identity`` (16 bytes) is that of the model, the tokenizer and the version of the forms: profiles of others may
    be in the file, are never returned, and go only when they are the oldest of very many. Several processes may have
    one file open. Thread-safe.
    """

    def __init__(self, path: Path, identity: bytes, max_profiles: int = 10_000) -> None:
        """Open the file, or make it and its folder, and check it through.

        Raises ValueError when ``path`` cannot be such a file, StoreDamaged, and StoreError while another process keeps
        it for itself.
        """
        if len(identity) != KEY_BYTES:
            raise ValueError(f"identity has {len(identity)} bytes: expected {KEY_BYTES}")
        if max_profiles < 1:
            raise ValueError(f"max_profiles is {max_profiles}: expected at least 1")
        self._identity = identity
        self._max_profiles = max_profiles
        self._turn = threading.Lock()
        try:
            self._path = real_path(path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd: int | None = lock(self._path, alone=False)
        except OSError as error:
            raise unusable(path, error.strerror) from error
        try:
            self._connection = open_to_write(self._path)
        except BaseException:
            unlock(self._lock_fd)
            raise

    def load(self) -> list[Profile]:
        """All profiles of this model, the oldest put first. Raises StoreError."""
        query = "SELECT * FROM profiles NOT INDEXED WHERE identity = ? ORDER BY sequence DESC LIMIT ?"
        with self._turn, worded(self._path, "read"):
            rows = self._connection.execute(query, (self._identity, self._max_profiles)).fetchall()
        return [read_profile(self._path, Row(*row)) for row in reversed(rows)]

    def put(self, profile: Profile) -> None:
        """Keep ``profile`` in place of any of the same context; it is on the disk when this returns.

        Raises StoreError when it could not be kept, and ValueError for a profile that would not read back as it is.
        """
        payload = orjson.dumps(profile.to_json())
        if Profile.from_json(orjson.loads(payload)) != profile:
            raise ValueError(f"profile {profile.key.hex()} would not read back as it is: expected finite figures")
        name = (self._identity, profile.key)
        with self._turn, worded(self._path, "written"), transaction(self._connection):
            connection = self._connection
            sequence = number(connection, "SELECT coalesce(max(sequence), 0) + 1 FROM profiles")
            connection.execute("DELETE FROM profiles WHERE identity = ? AND key = ?", name)
            connection.execute(INSERT, Row(sequence, *name, payload, checksum(sequence, *name, payload)))
            self._make_room(connection)

    def close(self) -> None:
        """Nothing can be put or loaded any more. Closing again does nothing."""
        with self._turn:
            self._connection.close()
            if self._lock_fd is not None:
                unlock(self._lock_fd)
            self._lock_fd = None

    def _make_room(self, connection: sqlite3.Connection) -> None:
        own = "FROM profiles WHERE identity = ?"
        surplus = number(connection, f"SELECT count(*) {own}", self._identity) - self._max_profiles
        if surplus > 0:
            oldest = f"SELECT sequence {own} ORDER BY sequence LIMIT ?"
            connection.execute(f"DELETE FROM profiles WHERE sequence IN ({oldest})", (self._identity, surplus))
        surplus = number(connection, "SELECT count(*) FROM profiles") - MAX_MODELS * self._max_profiles
        if surplus > 0:
            oldest = "SELECT sequence FROM profiles ORDER BY sequence LIMIT ?"
            connection.execute(f"DELETE FROM profiles WHERE sequence IN ({oldest})", (surplus,))
