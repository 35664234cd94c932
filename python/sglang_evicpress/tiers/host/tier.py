"""The host tier: entries in an arena of RAM, as large as they are."""

from __future__ import annotations

from sglang_evicpress.tiers.entry.copies import HostEntry
from sglang_evicpress.tiers.entry.header import BadEntry, check_part
from sglang_evicpress.tiers.faults import Faults
from sglang_evicpress.tiers.host.arena import STEP_BYTES, Arena


class HostTier:
    """Holders of host entries; everything but ``check`` is for the scheduler thread."""

    def __init__(
        self, num_bytes: int, *, is_pinned: bool, faults: Faults | None = None, step_bytes: int = STEP_BYTES
    ) -> None:
        self.arena = Arena(num_bytes, is_pinned=is_pinned, step_bytes=step_bytes)
        self._entries: dict[int, HostEntry] = {}  # all that has runs, by id()
        self.faults = faults

    @property
    def num_entries(self) -> int:
        """Number of entries that nodes hold, come or go."""
        return len(self._entries)

    def entries(self) -> list[HostEntry]:
        return list(self._entries.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that the tier may hold; fewer while memory to grow into is not to be had."""
        return self.arena.num_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.num_bytes - self.arena.extents.used_bytes)

    def hold(self, entry: HostEntry, node_id: int) -> None:
        """The node holds a piece of the entry."""
        self._entries[id(entry)] = entry
        entry.owners.add(node_id)

    def release(self, entry: HostEntry, node_id: int) -> None:
        entry.owners.discard(node_id)
        self._free_unused(entry)

    def pin(self, entry: HostEntry) -> None:
        """Its bytes stay where they are until ``unpin``."""
        self._entries[id(entry)] = entry
        entry.pins += 1

    def unpin(self, entry: HostEntry) -> None:
        entry.pins -= 1
        self._free_unused(entry)

    def _free_unused(self, entry: HostEntry) -> None:
        if not entry.owners and not entry.pins and entry.runs:
            self.arena.extents.free(entry.runs)
            entry.runs = ()
            del self._entries[id(entry)]

    def check(self, entry: HostEntry) -> None:
        """Verify every checksum, and what the codec says of each layer; on any thread, while the entry is pinned.
        Raises BadEntry."""
        if self.faults is not None:
            self.faults.maybe_delay()
        for number, extent in enumerate(entry.header.extents):
            chunks = self.arena.buffers(entry.runs, extent.offset, extent.num_bytes)
            # What a load reads meanwhile was seen to be good.
            if self.faults is not None and chunks and entry.pins == 1:
                self.faults.maybe_flip_host(chunks[0])
            try:
                check_part(entry.header, number, chunks)
            except BadEntry:
                entry.is_damaged = True
                raise

    def close(self) -> None:
        self.arena.close()
