"""The file of profiles, as the process that answers HTTP writes it: what the scheduler now goes by is on the disk
before whoever measured it hears so."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_evicpress.arguments import IntrospectionError, Json
from sglang_evicpress.profiler.lines import StoreError
from sglang_evicpress.profiler.profile import Profile
from sglang_evicpress.profiler.store import ProfileStore

logger = logging.getLogger(__name__)


class ProfileFile:
    """``path`` None keeps nothing. One thread owns the store, which is opened at the first profile."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._store: ProfileStore | None = None
        self._identity = b""
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
            if self._store is not None and identity != self._identity:  # the model was given other weights
                self._store.close()
                self._store = None
            if self._store is None and self._path is not None:
                self._store, self._identity = ProfileStore(self._path, identity), identity
            assert self._store is not None
            self._store.put(Profile.from_json(answered["profile"]))
        except (StoreError, ValueError) as error:
            logger.warning("evicpress: the profile was not saved: %s", error)
            raise IntrospectionError(507, f"the profile is used, but was not saved: {error}") from error
