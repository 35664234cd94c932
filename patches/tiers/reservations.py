"""Nodes that waiting requests hold: those that they will use on the GPU are locked there, those below that they will
load are kept from being pushed down again before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.prefetches import Prefetch
from sglang_evicpress.patches.tiers.ssd_io import SsdReads
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.node import num_slots
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.copies import HostEntry, SsdEntry

MOST_PREFETCH_SHARE = 1 / 2
"""Of the host tier: what waiting requests may hold there."""

MOST_PINNED_SHARE = 1 / 4
"""Of the pool: what waiting requests may keep on the GPU."""


@dataclass(eq=False, repr=False)
class Reservations:
    """``node_ids``: nodes below the GPU that are held; ``pinned_slots``: slots that were locked on it."""

    nodes: Mapping[int, Node]
    storage: Tiers
    ssd: SsdReads
    changed: Callable[[Node], None]
    lock: Callable[[Node], object]
    unlock: Callable[[Node], object]
    pool_size: int

    def __post_init__(self) -> None:
        self.node_ids: dict[int, None] = {}
        self.pinned_slots = 0
        self._known: tuple[object, set[HostEntry | SsdEntry], int] | None = None

    def pin(self, prefetch: Prefetch, resident: list[Node]) -> None:
        """Keep what the request will use on the GPU there, within ``MOST_PINNED_SHARE``."""
        last = resident[-1] if resident else None
        if prefetch.pinned is last:
            return
        self._unpin(prefetch)
        num_new = sum(num_slots(node) for node in resident if node.lock_ref == 0)
        if last is not None and self.pinned_slots + num_new <= MOST_PINNED_SHARE * self.pool_size:
            prefetch.pinned, prefetch.num_pinned = last, num_new
            self.pinned_slots += num_new
            self.lock(last)

    def _unpin(self, prefetch: Prefetch) -> None:
        if prefetch.pinned is not None:
            self.unlock(prefetch.pinned)
            self.pinned_slots -= prefetch.num_pinned
            prefetch.pinned, prefetch.num_pinned = None, 0

    def reserve(self, prefetch: Prefetch, node: Node, *, is_first: bool) -> None:
        """Keep what a request will load from being pushed down again before: the policy thinks of more distant uses.
        Not when so much is held already that reads could find no room, unless its turn ``is_first``: what was read for
        that could go again."""
        if node.id in prefetch.reserved:
            return
        if node.kv.num_prefetches == 0:
            copy = node.kv.copies.get(Tier.HOST)  # else it is being read, and there is room for it
            if copy is not None and not is_first and not self.may_reserve(copy.entry):
                return
            self.node_ids[node.id] = None
            if self._known is not None and copy is not None and copy.entry not in self._known[1]:
                reads, entries, num_bytes = self._known
                entries.add(copy.entry)
                self._known = reads, entries, num_bytes + _bytes_of(copy.entry)
        prefetch.reserved[node.id] = node
        node.kv.num_prefetches += 1
        self.changed(node)

    def may_reserve(self, entry: HostEntry | SsdEntry) -> bool:
        """True if waiting requests may hold one more entry on the host."""
        _, entries, num_bytes = self._counted()
        num_bytes += 0 if entry in entries else _bytes_of(entry)
        return num_bytes <= MOST_PREFETCH_SHARE * self.storage.host.num_bytes

    @property
    def num_bytes(self) -> int:
        """Host memory that waiting requests hold, or will once it is read."""
        return sum(map(_bytes_of, self._entries()))

    def _counted(self) -> tuple[object, set[HostEntry | SsdEntry], int]:
        """The reads, what is held, and its bytes: counted anew once something was released or a read has begun or
        ended. Each of hundreds of nodes is asked about at every look at the queue."""
        reads = len(self.ssd.reads), next(reversed(self.ssd.reads), None)
        if self._known is None or self._known[0] != reads:
            entries = self._entries()
            self._known = reads, entries, sum(map(_bytes_of, entries))
        return self._known

    def _entries(self) -> set[HostEntry | SsdEntry]:
        """What waiting requests hold on the host, and what is being read, whose memory is taken."""
        entries: set[HostEntry | SsdEntry] = {read.entry for read in self.ssd.reads}
        for node_id in self.node_ids:
            node = self.nodes.get(node_id)
            copy = None if node is None else node.kv.copies.get(Tier.HOST)
            if copy is not None:
                entries.add(copy.entry)
        return entries

    def release(self, prefetch: Prefetch) -> None:
        """A request holds nothing any more."""
        self._known = None if prefetch.reserved else self._known
        for node in prefetch.reserved.values():
            node.kv.num_prefetches -= 1
            if node.kv.num_prefetches == 0:
                del self.node_ids[node.id]
                if node.id in self.nodes:
                    self.changed(node)
        prefetch.reserved.clear()
        self._unpin(prefetch)

    def split(self, upper: Node, lower: Node, prefetches: Collection[Prefetch]) -> None:
        """``upper`` was split off ``lower``: both are held by whoever held that."""
        if lower.kv.num_prefetches:
            self._known = None
            upper.kv.num_prefetches, self.node_ids[upper.id] = lower.kv.num_prefetches, None
            for prefetch in prefetches:
                if lower.id in prefetch.reserved:
                    prefetch.reserved[upper.id] = upper

    def clear(self) -> None:
        """The tree is gone, and with it every lock."""
        self._known = None
        self.node_ids.clear()
        self.pinned_slots = 0


def _bytes_of(entry: HostEntry | SsdEntry) -> int:
    """Host memory that an entry takes; the header of one that is still being filled knows of nothing, and on some ranks
    longer than on others."""
    return entry.num_bytes if isinstance(entry, HostEntry) else entry.header.payload_bytes
