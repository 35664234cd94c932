"""Writes to the external store: what the tree holds is published, ahead of any need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.types import HostMemory, Names, Tiers
from sglang_evicpress.patches.tree.node import start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.tiers.entry.copies import Copy, ExternalCopy, HostEntry
from sglang_evicpress.tiers.external.store import ExternalStore
from sglang_evicpress.tiers.jobs import IO, Job

MOST_PUBLISHED = 4
"""Entries that are published at a time."""

AWAY = (IO, "deadline", "full")
"""Errors that tell of the store and not of the entry: it is published when the store takes it."""

MOST_QUEUED = 4096
MOST_NODES = 2
"""Nodes that each call looks at: to name one hashes all of its path."""


class ModestBackups(Protocol):
    """Copies to the host for which nothing makes room."""

    def copy_if_free(self, node: Node) -> bool: ...


class Invalidation(Protocol):
    """Copies that turned out to be damaged."""

    def invalidate_entry(self, entry: HostEntry, tier: Tier, reason: str) -> None: ...


class Signals(Protocol):
    """Signals of the tree."""

    def changed(self, node: Node) -> None: ...


@dataclass(eq=False, repr=False)
class ExternalWrites:
    """Publishes what the tree holds, ahead of any need, so that other servers find it: whatever is had sooner from the
    store than it is computed, as the host has it. What only the GPU has is copied to the host first, if there is room.
    """

    nodes: Mapping[int, Node]
    storage: Tiers
    names: Names
    room: HostMemory
    backups: ModestBackups
    removal: Invalidation
    changes: Signals
    _: KW_ONLY
    costs: Callable[[], CostSnapshot]
    observe: Callable[[Tier, int, float], None]
    slot_bytes: int

    def __post_init__(self) -> None:
        self._queue: dict[int, None] = {}
        self._num_under_way = 0

    def note(self, node: Node) -> None:
        """The node is new, or what it holds has changed."""
        known = node.kv.external
        is_known = known is not None and known.is_exact
        if self.storage.external is not None and not is_known and not node.kv.is_shadow:
            self._queue[node.id] = None
            if len(self._queue) > MOST_QUEUED:
                del self._queue[next(iter(self._queue))]

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._queue.pop(node.id, None)

    @property
    def is_busy(self) -> bool:
        """True if there is anything to publish."""
        store = self.storage.external
        return store is not None and bool(self._queue) and store.may_write and store.may_read

    def advance(self) -> None:
        """Look at a few nodes that are new, or have changed."""
        for _ in range(MOST_NODES):
            if self._num_under_way >= MOST_PUBLISHED or self.room.is_busy or not self.is_busy:
                return
            node_id = next(iter(self._queue))
            del self._queue[node_id]
            node = self.nodes.get(node_id)
            if node is not None and self._is_wanted(node):
                self._begin(node)

    def _is_wanted(self, node: Node) -> bool:
        if not node.kv.is_finite or not self.names.may_reach_ssd(node):
            return False
        num_tokens, costs = len(node.key), self.costs()
        load_s = costs.load_seconds(Tier.EXTERNAL, num_tokens * self.slot_bytes)
        return load_s < costs.prefill.marginal_seconds(num_tokens, start_of(node))

    def _begin(self, node: Node) -> None:
        store, copy = self.storage.external, node.kv.copies.get(Tier.HOST)
        if node.kv.external is not None and (copy is None or not copy.is_exact):
            return  # nothing better
        if copy is None:
            self.backups.copy_if_free(node)  # that it is there is a change
        elif store is not None and copy.begin == 0 and copy.entry.arrival is None and not copy.entry.is_damaged:
            self._num_under_way += 1
            Publish(self, store, copy.entry).start()

    def end_publish(self, job: Publish) -> None:
        self._num_under_way -= 1
        storage, entry = self.storage, job.entry
        owners = [self.nodes[node_id] for node_id in sorted(entry.owners)]
        if job.error is not None:
            storage.errors[f"external_{job.error}"] += 1
            if entry.is_damaged:
                self.removal.invalidate_entry(entry, Tier.HOST, job.error)
            elif job.error in AWAY:
                for node in owners:
                    self.note(node)
        elif job.is_there:
            self._note_there(job, owners)
        storage.host.unpin(entry)

    def _note_there(self, job: Publish, owners: Sequence[Node]) -> None:
        num_bytes = job.entry.header.payload_bytes
        if job.is_new:
            self.storage.counts["external_published"] += 1
            job.store.published_bytes += num_bytes
            if not job.store.read_bytes:  # until reads have told
                self.observe(Tier.EXTERNAL, num_bytes, job.seconds)
        for node in owners:
            copy = node.kv.copies[Tier.HOST]
            if copy.begin == 0:
                node.kv.external = external_copy(copy)
                self.changes.changed(node)


class Publish(Job):
    """Host to external store. ``is_there``: the store has these tokens now; ``is_new``: by this job."""

    def __init__(self, owner: ExternalWrites, store: ExternalStore, entry: HostEntry) -> None:
        super().__init__()
        self.owner, self.store, self.entry = owner, store, entry
        self.is_there = self.is_new = False

    def start(self) -> None:
        self.owner.storage.host.pin(self.entry)
        self.owner.storage.submit("publish", self)

    def run(self) -> None:
        header, host = self.entry.header, self.owner.storage.host
        host.check(self.entry)  # the store would keep what is damaged, and nothing good under its name
        chunks = host.arena.buffers(self.entry.runs, 0, header.payload_bytes)
        self.is_there, self.is_new = self.store.entries.publish(header, chunks)

    def finish(self) -> None:
        self.owner.end_publish(self)


def external_copy(copy: Copy) -> ExternalCopy:
    """Copy in the store of the node of a host copy, now that it has the entry."""
    return ExternalCopy(copy.form, copy.entry.header.payload_bytes, copy.mean_slots, copy.is_exact)
