"""The SSD tier of one rank: its store, the entries that nodes hold, and its wear budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_evicpress.config import GB
from sglang_evicpress.tiers.entry.copies import SsdEntry
from sglang_evicpress.tiers.entry.header import Header
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.faults import Faults, FaultyFiles
from sglang_evicpress.tiers.jobs import Job, Workers
from sglang_evicpress.tiers.ssd.deadline import within
from sglang_evicpress.tiers.ssd.folder import Folder, StoreError, allowed_root
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.store import SsdStore
from sglang_evicpress.tiers.ssd.wear import WearBudget

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""A folder that is attached or let go is waited for; the scheduler stands still meanwhile."""
ENDLESS = 1 << 62
MOST_LOOKED_AT = 1024
SLACK_BYTES = 1 << 20
"""For records, beside the payloads."""


class SsdTier:
    """Everything here is for the scheduler thread."""

    def __init__(self, store: SsdStore, bytes_per_day: float | None, folder: str) -> None:
        self.store = store
        self.folder = folder
        self.wear = WearBudget(bytes_per_day, self.now_s)
        self.former_wear: WearBudget | None = None
        self._held: dict[Any, SsdEntry] = {}
        self._open: Callable[[bytes], SsdTier]
        self._held_bytes = 0
        self._looked_at: Any = None  # of the entries that were found, by ``drop_unused``
        self._last_found = store.newest_segment
        self._reclaim: Reclaim | None = None

    @classmethod
    def open(
        cls,
        folder: str,
        num_bytes: int,
        bytes_per_day: float | None,
        sync: str,
        identity: bytes,
        faults: Faults | None,
        rank: int = 0,
        *,
        key: Key | None = None,
        roots: Sequence[str] | None = None,
    ) -> SsdTier:
        """The tier in ``folder``, its entries sealed with ``key``. With ``roots`` the folder has to lie in one of them,
        and its file system has to be that large. Raises StoreError, one sentence, when the folder cannot be used."""

        def open_for(identity: bytes) -> SsdTier:
            if roots is None:
                opened = Folder.open(Path(folder))
            else:
                opened = Folder.open(Path(folder), root=allowed_root(folder, roots))
                found = os.fstatvfs(opened.fd)
                if num_bytes > found.f_blocks * found.f_frsize:
                    raise StoreError(
                        f"{num_bytes / GB:g} GB of SSD folder {folder} cannot be used: its file system has "
                        f"{found.f_blocks * found.f_frsize / GB:.1f} GB"
                    )
            files = None if faults is None else FaultyFiles(faults)
            where = opened.child(f"rank-{rank}")
            store = SsdStore(where, num_bytes, identity, sync=sync, files=files, key=key)
            tier = cls(store, bytes_per_day, folder)
            tier._open = open_for
            return tier

        return open_for(identity)

    @classmethod
    def attach(cls, folder: str, *arguments: Any, **options: Any) -> SsdTier:
        """``open`` on a thread of its own. Raises StoreError, also when it takes longer than ANSWER_S."""
        return within(
            ANSWER_S,
            f"SSD folder {folder}",
            lambda: cls.open(folder, *arguments, **options),
            undo=lambda tier: tier.store.close(),
        )

    def reopened(self, identity: bytes) -> SsdTier:
        """The same folder for another model, once the store is closed. Raises StoreError as ``attach``."""
        opened = within(
            ANSWER_S, f"SSD folder {self.folder}", lambda: self._open(identity), undo=lambda tier: tier.store.close()
        )
        opened.wear = opened.former_wear = self.wear  # the disk is the same
        return opened

    def close(self, seconds: float | None = None) -> bool:
        """Close the store on a thread of its own. False, and told, when it takes longer than so many seconds (without
        them ANSWER_S): what is not durable then may be lost, and the folder stays locked until the disk answers."""
        try:
            within(ANSWER_S if seconds is None else seconds, f"SSD folder {self.folder}", self.store.close)
        except StoreError as error:
            logger.error("evicpress: %s: it is closed when it does", error)
            return False
        return True

    @property
    def now_s(self) -> float:
        return time.monotonic()

    @property
    def room(self) -> int:
        """Free bytes, and those of entries no node holds; endless while nothing may be written, so that no plan makes
        room for what will not come."""
        store = self.store
        if not self.is_writable or not self.wear.allows(self.now_s):
            return ENDLESS
        return max(0, store.capacity_bytes - self._held_bytes)

    @property
    def is_writable(self) -> bool:
        """True if writes are taken now."""
        return self.store.is_writable

    @property
    def is_answering(self) -> bool:
        """True if the disk does what it is asked to."""
        return self.store.is_answering

    @property
    def has_former(self) -> bool:
        """True if entries of an earlier server may be found."""
        return self.store.num_entries > 0

    @property
    def used_bytes(self) -> int:
        """Bytes taken of ``store.capacity_bytes``."""
        return self.store.used_bytes

    def reserve(self, num_bytes: int, workers: Workers) -> Any:
        """Room for a payload, for ``write``; None where there is none."""
        return self.store.reserve(num_bytes)

    def write(self, reservation: Any, header: Header, chunks: Sequence[memoryview]) -> Ref:
        """See ``SsdStore.write``; on any thread."""
        return self.store.write(reservation, header, chunks)

    def end_write(self, reservation: Any) -> None:
        """The write of what was reserved is over, and what was written is about to be held, if anything was."""

    def hold(self, ref: Any, header: Header) -> SsdEntry:
        """The entry called ``ref``, which a node is about to hold."""
        entry = self._held.get(ref)
        if entry is None:
            entry = self._held[ref] = SsdEntry(header, ref)
            self._held_bytes += header.payload_bytes
        return entry

    def entries(self) -> list[SsdEntry]:
        """Entries that nodes hold, in the order they came."""
        return list(self._held.values())

    def is_held(self, ref: Any) -> bool:
        return ref in self._held

    def remove(self, entry: SsdEntry, workers: Workers) -> None:
        """No node holds the entry any more: it goes."""
        if self._held.pop(entry.ref, None) is not None:
            self._held_bytes -= entry.header.payload_bytes
        self.forget(entry.ref, workers)

    def forget(self, ref: Any, workers: Workers) -> None:
        """The entry goes; a thread gives its bytes back."""
        self.store.remove(ref, is_lazy=True)
        self.reclaim(workers)

    def reclaim(self, workers: Workers) -> None:
        """Have the bytes of removed entries given back; of those that come while that goes on, right after it."""
        if self._reclaim is not None and not self._reclaim.is_finished:
            self._reclaim.is_due_again = True
            return
        self._reclaim = Reclaim(self, workers)
        workers.submit(self._reclaim)

    def lacking(self, num_bytes: int) -> int:
        """Bytes still to be removed before so many fit; 0 when what is removed has only to be given
        back."""
        store = self.store
        return max(0, store.used_bytes - store.garbage_bytes + num_bytes + SLACK_BYTES - store.capacity_bytes)

    def drop_unused(self, num_bytes: int, limit: int, workers: Workers) -> int:
        """Make room of entries that no node holds, the oldest first, at most ``limit`` of them; returns how many went.

        They are those of earlier servers: one that a node has held goes with it. So none is looked at twice, and no
        call looks at more than ``MOST_LOOKED_AT``.
        """
        num_dropped = 0
        for ref in self.store.entries_behind(self._looked_at, MOST_LOOKED_AT) if num_bytes > 0 else ():
            if num_bytes <= 0 or num_dropped >= limit:
                break
            if ref.segment > self._last_found:
                break
            self._looked_at = ref
            if not self.is_held(ref):
                self.forget(ref, workers)
                num_bytes -= ref.num_bytes
                num_dropped += 1
        return num_dropped

    def clear(self, workers: Workers) -> None:
        """Forget every entry that no node holds, also those of earlier servers."""
        last = None
        while refs := self.store.entries_behind(last, MOST_LOOKED_AT):
            last = refs[-1]
            for ref in refs:
                if ref not in self._held:
                    self.forget(ref, workers)


class Reclaim(Job):
    """Gives the bytes of removed entries back to the file system."""

    priority = 2
    is_local = True

    def __init__(self, tier: SsdTier, workers: Workers) -> None:
        super().__init__()
        self.tier, self.workers = tier, workers
        self.is_due_again = False

    def run(self) -> None:
        self.tier.store.reclaim()

    def finish(self) -> None:
        if self.is_due_again:
            self.tier.reclaim(self.workers)
