"""Reads from the external store: entries are looked for where the tree ends, and read into host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.prefetches import Prefetch, Worth
from sglang_evicpress.patches.tiers.ssd_io import shared_tokens
from sglang_evicpress.patches.tiers.types import HostMemory, Names, Runs, Tiers
from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.load_or_recompute import Piece
from sglang_evicpress.tiers.entry.copies import HostEntry
from sglang_evicpress.tiers.entry.header import BadEntry, Header, check_identity
from sglang_evicpress.tiers.entry.identity import namespace_digest, token_bytes
from sglang_evicpress.tiers.external.entries import BEGINS, LEVELS, FoundEntry
from sglang_evicpress.tiers.external.store import ExternalStore
from sglang_evicpress.tiers.jobs import Job

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

RETRY_S = 1.0
"""After so long without host memory for what was found, somebody may look again."""

EXPLORE_S = 10.0
"""After so long without a read from the store one is made to see what it costs."""

MOST_LOOKUPS, MOST_READS = 16, 4
"""At a time."""

LARGEST_SHARE = 1 / 2
"""Of host memory, that one entry may take."""


class GraftedTree(Protocol):
    """Places of entries that were read."""

    def graft_read(
        self, key: RadixKey, header: Header, survivors: bytes | None, entry: HostEntry
    ) -> Node | Literal["taken", "unusable"]: ...


@dataclass(eq=False, repr=False)
class ExternalReads:
    """Looks for entries that continue a path, and reads them. On the scheduler thread but for ``run`` of the jobs.
    ``observe``: is told what bringing bytes from a tier took; ``takes_lossy``: this server makes lossy KV itself."""

    storage: Tiers
    names: Names
    room: HostMemory
    terms: Worth
    grafts: GraftedTree
    _: KW_ONLY
    costs: Callable[[], CostSnapshot]
    observe: Callable[[Tier, int, float], None]
    slot_bytes: int
    page_size: int
    takes_lossy: bool

    def __post_init__(self) -> None:
        self.levels = LEVELS if self.takes_lossy else LEVELS[:1]
        self._lookups: dict[tuple[bytes, bytes], ExternalLookup] = {}
        self._reading: dict[bytes, ExternalRead] = {}  # by digest
        self._retry_s = 0.0
        self._awaited: dict[ExternalLookup | ExternalRead, None] = {}
        self._read_s = self.storage.now_s()

    @property
    def is_busy(self) -> bool:
        """True while what would be found could not be read, or so many lookups are under way that none can begin."""
        is_full = len(self._lookups) >= MOST_LOOKUPS or len(self._reading) >= MOST_READS
        return is_full or self.storage.now_s() < self._retry_s

    def look_up(self, prefetch: Prefetch, key: RadixKey, begin: int, path_key: bytes, scope: SsdScope) -> None:
        """Look for what follows the first ``begin`` tokens of ``key``, of which ``path_key`` is the hash. The request
        waits for it where that is likely to save it more than it takes."""
        store = self.storage.external
        if store is None or not store.may_read:
            return
        num_tokens = len(key) - begin
        piece = Piece(num_tokens, begin, Tier.EXTERNAL, num_tokens * self.slot_bytes)
        is_worth = self.terms.num_worth(prefetch, [piece]) > 0
        if not is_worth and self.storage.now_s() - self._read_s < EXPLORE_S:
            return
        which = path_key, token_bytes(key.token_ids[begin : min(begin + BEGINS[-1], len(key))])
        job = self._lookups.get(which)
        if job is None:
            job = self._lookups[which] = ExternalLookup(self, store, key, begin, which, scope)
            self.storage.submit("lookup", job)
        job.asked.append(prefetch)
        saved_s = self.costs().prefill.marginal_seconds(num_tokens, begin)
        saved_s -= self.costs().load_seconds(Tier.EXTERNAL, piece.num_bytes)
        if is_worth and store.gain.is_worth_waiting(saved_s):
            prefetch.max_wait_s = max(prefetch.max_wait_s, self.terms.max_wait_s(prefetch, [piece]))
            self._let_wait(job, prefetch)

    def _let_wait(self, job: ExternalLookup | ExternalRead, prefetch: Prefetch) -> None:
        self._awaited[job] = None
        job.waiting.append(prefetch)
        prefetch.jobs.append(job)

    def advance(self) -> None:
        """Let no request wait for a store that hangs."""
        store = self.storage.external
        if store is None or not self._awaited or not store.circuit.hangs:
            return
        for job in self._awaited:
            for prefetch in job.waiting:
                if job in prefetch.jobs:
                    prefetch.jobs.remove(job)
            job.waiting.clear()
        self._awaited.clear()

    def end_lookup(self, job: ExternalLookup) -> None:
        """Read what was found, if that is sooner there than it is computed."""
        del self._lookups[job.which]
        self._awaited.pop(job, None)
        read = None if job.found is None or not self._is_current(job) else self._start_read(job, job.found)
        if job.error is None:  # what a failing store took says nothing of one that answers
            job.store.gain.observe(self.storage.now_s() - job.begun_s, is_hit=read is not None)
        if read == "later":
            for prefetch in job.asked:
                prefetch.looked_at.discard(job.begin)
        elif read is not None:
            for prefetch in job.waiting:
                self._let_wait(read, prefetch)

    def _is_current(self, job: ExternalLookup) -> bool:
        """False where the store or the model is another one by now, or the tree may hold KV of two."""
        is_same = self.names.ssd_scope(job.key.extra_key) == job.scope and self.names.identity == job.identity
        return is_same and job.store is self.storage.external and not job.store.is_paused

    def _start_read(self, job: ExternalLookup, found: FoundEntry) -> ExternalRead | Literal["later"] | None:
        """The job that reads what was found, which may have begun for another request; "later": it is worth reading,
        and cannot be read now."""
        under_way = self._reading.get(found.digest)
        if under_way is not None and under_way.store is job.store:
            return under_way
        num_bytes, num_shared = found.header.payload_bytes, job.num_shared
        recompute_s = self.costs().prefill.marginal_seconds(num_shared, job.begin)
        load_s = self.costs().load_seconds(Tier.EXTERNAL, num_bytes, found.header.form.codec)
        is_worth = load_s < recompute_s
        is_due = self.storage.now_s() - self._read_s >= EXPLORE_S and 2 * num_shared >= found.header.num_tokens
        if not (is_worth or is_due) or not job.store.may_read:
            return None
        if len(self._reading) >= MOST_READS:
            return "later" if is_worth else None
        runs = self.room.host_room(num_bytes) if is_worth else self.room.free_room(num_bytes)
        if runs is None:
            if is_worth:
                self.room.want(num_bytes)
                self._retry_s = self.storage.now_s() + RETRY_S
            self.storage.counts["external_without_room"] += 1
            return "later" if is_worth else None
        self._read_s = self.storage.now_s()
        read = self._reading[found.digest] = ExternalRead(self, job, found, runs)
        self.room.begin_copy(read.host.num_bytes)
        self.storage.host.pin(read.host)
        self.storage.submit("external", read)
        return read

    def end_read(self, job: ExternalRead) -> None:
        """Put what was read into the tree."""
        storage, host = self.storage, job.host
        del self._reading[job.found.digest]
        self._awaited.pop(job, None)
        self.room.end_copy(host.num_bytes)
        if job.error is None:
            storage.counts["external_read"] += 1
            job.store.read_bytes += host.header.payload_bytes
            host.checked_s = storage.now_s()
            # Its way on to the GPU is part of what it takes.
            num_bytes = host.header.payload_bytes
            self.observe(Tier.EXTERNAL, num_bytes, job.seconds + self.costs().load_seconds(Tier.HOST, num_bytes))
            if self._is_current(job.lookup):
                grafted = self.grafts.graft_read(job.key, host.header, job.survivors, host)
                storage.counts["external_found"] += not isinstance(grafted, str)
                if grafted == "unusable":
                    job.store.entries.pass_over(job.found.digest)
        else:
            storage.errors[f"external_{job.error}"] += 1
        storage.host.unpin(host)


class ExternalLookup(Job):
    """Finds the entry that continues a path: ``which``, by its key and the first tokens behind it. ``asked``: for whom,
    ``waiting``: those of them who wait for it."""

    priority = 0

    def __init__(
        self,
        owner: ExternalReads,
        store: ExternalStore,
        key: RadixKey,
        begin: int,
        which: tuple[bytes, bytes],
        scope: SsdScope,
    ) -> None:
        super().__init__()
        self.owner, self.store, self.key, self.begin = owner, store, key, begin
        self.which, self.scope, self.identity = which, scope, owner.names.identity
        self.begun_s = owner.storage.now_s()
        self.tokens = token_bytes(key.token_ids[begin : len(key)])
        self.asked: list[Prefetch] = []
        self.waiting: list[Prefetch] = []
        self.found: FoundEntry | None = None
        self.num_shared = 0

    def run(self) -> None:
        entries, owner, found = self.store.entries, self.owner, None
        problem: BadEntry | None = None
        for name in entries.names(self.which[0], self.tokens, 4 * owner.page_size):
            try:
                found = entries.find(name, self.tokens, owner.levels)
            except BadEntry as error:  # a name of fewer tokens may have something
                problem = error
            if found is not None:
                break
        if found is None:
            if problem is not None:
                raise problem
            return
        header = found.header
        check_identity(
            header,
            fingerprint=self.identity,
            namespace=namespace_digest(self.scope.namespace),
            parent_key=self.which[0],
        )
        self.num_shared = shared_tokens(header.tokens, self.tokens)
        is_ours = header.start == self.begin and header.shape == owner.storage.copier.shape
        is_small = header.payload_bytes <= LARGEST_SHARE * owner.storage.host.num_bytes
        if is_ours and is_small and header.num_slots and self.num_shared >= owner.page_size:
            self.found = found

    def finish(self) -> None:
        if self.error is not None:
            self.owner.storage.errors[f"external_{self.error}"] += 1
        self.owner.end_lookup(self)


class ExternalRead(Job):
    """External store to host, verified."""

    priority = 0

    def __init__(self, owner: ExternalReads, lookup: ExternalLookup, found: FoundEntry, runs: Runs) -> None:
        super().__init__()
        self.owner, self.lookup, self.store, self.found, self.key = owner, lookup, lookup.store, found, lookup.key
        self.host = HostEntry(replace(found.header, seals=b"", payload_offset=0), runs)
        self.survivors: bytes | None = None
        self.waiting: list[Prefetch] = []

    def run(self) -> None:
        header, arena = self.found.header, self.owner.storage.host.arena
        self.store.entries.read(self.found, arena.buffers(self.host.runs, 0, header.payload_bytes))
        if len(header.extents) > header.shape.num_layers:
            extent = header.extents[-1]
            self.survivors = b"".join(arena.buffers(self.host.runs, extent.offset, extent.num_bytes))

    def finish(self) -> None:
        self.owner.end_read(self)
