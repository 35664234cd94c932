"""The file of profiles, as the process that answers HTTP writes it: what the scheduler now goes by is on the disk
before whoever measured it hears so."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_evicpress.introspect.arguments import IntrospectionError, Json
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.store import ProfileStore, StoreError

logger = logging.getLogger(__name__)

MAX_UNSAVED = 10_000
"""Profiles that wait for the file to be usable again; the oldest go first."""


class ProfileFile:
    """``path`` None keeps nothing. One thread owns the store, which is opened at the first profile; one that could not
    be saved is saved with the next."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._store: ProfileStore | None = None
        self._identity = b""
        self._unsaved: dict[bytes, Profile] = {}
        self._thread = ThreadPoolExecutor(1, "evicpress-profiles")

    async def keep(self, answered: Json) -> None:
        """Save the profile in what the scheduler answered. Raises IntrospectionError 507 when it cannot be."""
        if self._path is not None:
            await asyncio.wrap_future(self._thread.submit(self._keep, answered))

    def keep_now(self, answered: Json) -> None:
        """``keep`` for a thread that may wait."""
        if self._path is not None:
            self._thread.submit(self._keep, answered).result()

    def _keep(self, answered: Json) -> None:
        try:
            identity = bytes.fromhex(str(answered["identity"]))
            profile = Profile.from_json(answered["profile"])
            if identity != self._identity:  # the model was given other weights
                self._store, self._identity = None, identity
                self._unsaved.clear()
            self._unsaved.pop(profile.key, None)
            self._unsaved[profile.key] = profile
            while len(self._unsaved) > MAX_UNSAVED:
                del self._unsaved[next(iter(self._unsaved))]
            self._save()
        except (StoreError, ValueError) as error:
            logger.warning("evicpress: the profile was not saved: %s", error)
            raise IntrospectionError(507, f"the profile is used, but was not saved: {error}") from error

    def _save(self) -> None:
        """Raises StoreError, and ValueError, when the file cannot be used now; what is not saved waits."""
        if self._store is None:
            assert self._path is not None
            self._store = ProfileStore(self._path, self._identity)
        for key, profile in list(self._unsaved.items()):
            self._store.put(profile)
            del self._unsaved[key]
