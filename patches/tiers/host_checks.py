"""Verifying entries in host memory before they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.tiers.entry.copies import HostEntry
from sglang_evicpress.tiers.jobs import Job

VERIFIED_S = 10.0
"""So long a host entry that was written or verified by us is taken to be good. Entries never move, but memory can fail.
To verify one takes a millisecond of a thread of its own, and makes nobody late who waits for a turn."""


def is_verified(entry: HostEntry, now_s: float, seconds: float = VERIFIED_S) -> bool:
    """True if the entry was good so shortly before."""
    return entry.checked_s >= now_s - seconds


@dataclass(eq=False, repr=False)
class HostChecks:
    """Begins to verify. ``invalidate_entry`` is told of each entry that cannot be read, its tier and the reason."""

    storage: Tiers
    invalidate_entry: Callable[[HostEntry, Tier, str], None]

    def start(self, entry: HostEntry) -> Job:
        """The job that verifies a host entry, or fills it."""
        if entry.arrival is not None:
            arrival: Job = entry.arrival
            return arrival
        if entry.check is None:
            entry.check = Check(self, entry)
            self.storage.host.pin(entry)
            self.storage.submit("check", entry.check)
        job: Job = entry.check
        return job


class Check(Job):
    """Verifies a host entry, on a thread that no SSD holds up."""

    priority = 0

    def __init__(self, owner: HostChecks, entry: HostEntry) -> None:
        super().__init__()
        self.owner, self.entry = owner, entry

    def run(self) -> None:
        self.owner.storage.host.check(self.entry)

    def finish(self) -> None:
        owner, entry = self.owner, self.entry
        entry.check = None
        entry.check_seconds = self.seconds
        if self.error is None:
            entry.checked_s = owner.storage.now_s()
        else:
            owner.invalidate_entry(entry, Tier.HOST, self.error)
        owner.storage.host.unpin(entry)
