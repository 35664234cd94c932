"""The SSD tier of one of several ranks: what is decided by it is the same on all, whatever is on this rank's disk."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_evicpress.tiers.entry.header import Header
from sglang_evicpress.tiers.jobs import Workers
from sglang_evicpress.tiers.ssd.index import Ref
from sglang_evicpress.tiers.ssd.tier import SLACK_BYTES, SsdTier
from sglang_evicpress.tiers.ssd.wear import WearBudget

RECORDS_SHARE = 1 / 16
"""Of the folder: for records, unfinished blocks, and garbage that is not given back yet."""
MOST_DROPPED = 64


class AgreedHealth(Protocol):
    """State of the worst disk."""

    @property
    def is_writable(self) -> bool: ...
    @property
    def is_answering(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Promise:
    """Room for so many bytes that ranks agree there is; each finds its own when it writes."""

    num_bytes: int


class SharedSsdTier(SsdTier):
    """Counts what nodes hold and what is being written, which ranks agree on, and not what is on the disk. A rank whose
    disk has no room after all fails to write, and so all have."""

    _clock: Callable[[], float] = staticmethod(lambda: 0.0)
    _health: Callable[[], AgreedHealth]

    def share(self, clock: Callable[[], float], health: Callable[[], AgreedHealth], *, has_former: bool) -> None:
        """Go by this clock and health. ``has_former``: a rank has found entries of an earlier server."""
        self._clock, self._health, self._has_former = clock, health, has_former
        self._writing_bytes = 0
        self.wear = self.former_wear or WearBudget(self.wear.bytes_per_day, clock())

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def is_writable(self) -> bool:
        return self._health().is_writable

    @property
    def is_answering(self) -> bool:
        return self._health().is_answering

    @property
    def has_former(self) -> bool:
        return self._has_former

    @property
    def used_bytes(self) -> int:
        return self._held_bytes + self._writing_bytes

    def lacking(self, num_bytes: int) -> int:
        return max(0, self.used_bytes + num_bytes + SLACK_BYTES - self._capacity_bytes)

    @property
    def _capacity_bytes(self) -> int:
        return int((1 - RECORDS_SHARE) * self.store.capacity_bytes)

    def drop_unused(self, num_bytes: int, limit: int, workers: Workers) -> int:
        """Entries of earlier servers take no room that ranks count: see ``reserve``."""
        return 0

    def reserve(self, num_bytes: int, workers: Workers) -> Promise | None:
        if self.used_bytes + num_bytes > self._capacity_bytes:
            return None
        super().drop_unused(super().lacking(num_bytes), MOST_DROPPED, workers)
        self._writing_bytes += num_bytes
        return Promise(num_bytes)

    def write(self, reservation: Any, header: Header, chunks: Sequence[memoryview]) -> Ref:
        found = self.store.reserve(reservation.num_bytes)
        if found is None:
            self.store.reclaim()
            found = self.store.reserve(reservation.num_bytes)
        if found is None:
            raise OSError(errno.ENOSPC, "this rank's folder has no room for what all ranks write")
        return self.store.write(found, header, chunks)

    def end_write(self, reservation: Any) -> None:
        self._writing_bytes -= reservation.num_bytes

    def clear(self, workers: Workers) -> None:
        super().clear(workers)
        self._has_former = False
