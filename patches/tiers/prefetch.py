"""Getting what a waiting request will use ready for loading: SSD entries are read, host entries are verified, what the
GPU has is kept there.

The scheduler passes a request over while that goes on, until it is done, or late: then the request takes what is ready
and computes the rest. It can only be late once it could have run: what waits for its turn anyhow waits for nothing.
Whether anything is begun is the cost model's choice, by what is ready when the request's turn is expected and by how
many others computing would hold up.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.ssd_io import Lookup
from sglang_evicpress.patches.tree.node import num_slots, servable_steps, start_of
from sglang_evicpress.policy.load_or_recompute import Piece, deadline_s, num_worth_loading
from sglang_evicpress.policy.wait_cost import Congestion
from sglang_evicpress.tiers.entry.copies import Copy, HostEntry, SsdEntry
from sglang_evicpress.tiers.jobs import Job

VERIFIED_S = 10.0
"""So long a host entry that was written or verified by us is taken to be good. Entries never move, but memory can fail.
To verify one takes a millisecond of a thread of its own, and makes nobody late who waits for a turn."""

EXPLORE_S = 10.0
"""After so long without a read from the SSD one is made to see what it costs."""

MOST_PREFETCH_SHARE = 1 / 2
"""Of the host tier: what waiting requests may hold there."""

MOST_PINNED_SHARE = 1 / 4
"""Of the pool: what waiting requests may keep on the GPU."""

WINDOW = 32
"""So many requests from the head of the queue are got ready."""

RELOOK_S = 0.05
"""How often a request that waits is looked at when nothing of it is under way: what it needs may have moved."""

MOST_READS = 4
"""Reads for requests whose turn has not come that are begun at a time: the next ones are those of the next in turn."""

MOST_CONGESTION = 8.0
"""How many times a second of computing counts at most when others wait for it."""


class Prefetch:
    """Prefetch for one waiting request. ``from_ssd``: the entries that came from the SSD for it; ``reserved``: the
    nodes below the GPU that stay where they are for it, by id; ``pinned``: the last node on the GPU that does, with all
    above it. ``turn_s``: when it could first have run, and ``max_wait_s`` from then on it may be passed over.
    ``num_to_run``: slots that it needs besides what is on the GPU. ``short_of``: for want of what something is not
    begun yet; ``is_without_room``: there was no host memory for a read, nor any to be expected.
    """

    __slots__ = (
        "from_ssd",
        "is_late",
        "is_without_room",
        "jobs",
        "looked_at",
        "looked_s",
        "max_wait_s",
        "num_needed",
        "num_to_run",
        "pinned",
        "refused_by",
        "req",
        "reserved",
        "short_of",
        "turn_s",
    )

    def __init__(self, req: Any) -> None:
        self.req = req
        self.turn_s: float | None = None
        self.max_wait_s = self.looked_s = 0.0
        self.is_late = self.is_without_room = False
        self.short_of: str | None = None
        self.jobs: list[Job] = []
        self.from_ssd: set[HostEntry] = set()
        self.reserved: dict[int, Any] = {}
        self.pinned: Any = None
        self.num_needed = self.num_to_run = 0
        self.refused_by: int | None = None  # the host's plan after which a read found no room
        self.looked_at: set[int] = set()

    @property
    def is_waiting(self) -> bool:
        """True if anything is on its way, or will be."""
        return bool(self.jobs) or self.short_of is not None

    @property
    def has_unfinished_jobs(self) -> bool:
        return any(not job.is_finished for job in self.jobs)


class Prefetcher:
    """The part of EvicPressCache that prefetches. Everything here runs on the scheduler thread. ``prefetches`` are in
    the order in which the requests came, which is that of their turns where SGLang serves first come, first served."""

    def open_prefetches(self: Any) -> None:
        self.prefetches: dict[int, Prefetch] = {}
        self.prefetch_nodes: dict[int, None] = {}  # nodes that are held, by id
        self.pins: dict[int, int] = {}  # slots that were locked for a prefetch, by its id()
        self.pinned_slots = 0
        self.congestion = Congestion()
        self.num_ready = 0  # requests at the head of the queue for which nothing is on its way

    def begin_prefetch(self: Any, req: Any) -> None:
        """A request has entered the waiting queue."""
        if self.host is None or self.disable:
            return
        former = self.prefetches.pop(id(req), None)
        if former is not None:
            self._release(former)
        num_ahead = len(self.prefetches)
        prefetch = self.prefetches[id(req)] = Prefetch(req)
        if num_ahead < WINDOW:
            self._advance(prefetch, num_ahead)

    def is_prefetching(self: Any, req: Any, *, has_turn: bool = True) -> bool:
        """True if a waiting request is to be passed over for now. ``has_turn``: it could run, were it not for that;
        else what it waits for makes nobody wait for it."""
        prefetch = self.prefetches.get(id(req))
        if prefetch is None:
            return False
        now = time.perf_counter()
        if prefetch.turn_s is None and not has_turn:
            return prefetch.is_waiting or not prefetch.looked_s
        if prefetch.turn_s is None:
            prefetch.turn_s = now
        if prefetch.is_late:
            return False  # what else comes is of use if there is no room for the request now
        self._advance(prefetch, 0)
        if not prefetch.is_waiting:
            return False
        if now <= prefetch.turn_s + prefetch.max_wait_s:
            return True
        prefetch.is_late = True
        self.storage.counts["prefetches_late"] += 1
        return False

    def is_passed_over(self: Any, req: Any) -> bool:
        """True if the request could run and nothing new can be said of it: SGLang need not even look it up."""
        prefetch = self.prefetches.get(id(req))
        if prefetch is None or prefetch.turn_s is None or not prefetch.has_unfinished_jobs:
            return False
        return time.perf_counter() <= prefetch.turn_s + prefetch.max_wait_s

    def advance_prefetches(self: Any) -> None:
        """Go on with the requests at the head of the queue, the first first."""
        now = time.perf_counter()
        num_ready = 0
        for num_ahead, prefetch in enumerate(list(islice(self.prefetches.values(), WINDOW))):
            if prefetch.jobs or now - prefetch.looked_s >= RELOOK_S:
                self._advance(prefetch, num_ahead)
            num_ready += not prefetch.is_waiting
        self.congestion.observe(now, self.num_ready)
        self.num_ready = num_ready

    def keep_prefetches(self: Any, waiting: Collection[Any]) -> None:
        """Forget the prefetches of requests that do not wait any more."""
        if len(self.prefetches) > len(waiting):
            ids = {id(req) for req in waiting}
            for key in [key for key in self.prefetches if key not in ids]:
                self._release(self.prefetches.pop(key))

    @property
    def num_prefetching(self: Any) -> int:
        return sum(prefetch.is_waiting for prefetch in self.prefetches.values())

    @property
    def num_slots_needed(self: Any) -> int:
        """Slots that the next requests will take."""
        return sum(prefetch.num_needed for prefetch in islice(self.prefetches.values(), WINDOW))

    def ready_to_load(self: Any, req: Any, steps: list[tuple[Any, int]], num_resident: int) -> int:
        """Number of ``steps``, from the first not on the GPU, that are verified on the host and worth loading."""
        prefetch = self.prefetches.get(id(req))
        if prefetch is None:
            return 0
        count = num_resident
        while count < len(steps) and _is_verified(steps[count][0], 2 * VERIFIED_S):
            count += 1
        return num_worth_loading(
            self._pieces(steps[num_resident:count]), self.costs, congestion=self._congestion(prefetch)
        )

    def _congestion(self: Any, prefetch: Prefetch) -> float:
        """Factor by which a second of computing counts: others that are ready wait for it, and those for whom something
        is being read are ready after half of it, as likely as not."""
        num_ready = max(0, self.num_ready - (not prefetch.is_waiting))
        num_soon = sum(read not in prefetch.jobs for read in self.ssd_io.reads)
        return min(MOST_CONGESTION, 1.0 + num_ready + num_soon / 2)

    def _pieces(self: Any, steps: list[tuple[Any, int]]) -> list[Piece]:
        pieces, read = [], set()
        depth = 0 if not steps else start_of(steps[0][0])
        for node, matched in steps:
            tier = Tier.HOST if Tier.HOST in node.kv.copies else Tier.SSD
            copy = node.kv.copies[tier]
            num_bytes = copy.num_slots * self.menu.slot_bytes
            if tier == Tier.SSD:  # all of an entry is read for any piece of it, once
                num_bytes = 0 if copy.entry in read else copy.entry.header.payload_bytes
                read.add(copy.entry)
            pieces.append(Piece(matched, depth, tier, num_bytes))
            depth += matched
        return pieces

    def _advance(self: Any, prefetch: Prefetch, num_ahead: int) -> None:
        """Take in what is done, and begin whatever the request still needs and is worth it."""
        if prefetch.has_unfinished_jobs:
            return
        lookups = [job for job in prefetch.jobs if isinstance(job, Lookup)]
        prefetch.jobs, prefetch.short_of, prefetch.looked_s = [], None, time.perf_counter()
        for job in lookups:
            self._graft(prefetch, job)
        key = self.key_of_waiting(prefetch.req)
        known = self._steps(key)
        steps = known[: servable_steps(known, self.config.min_match_kept)]
        num_resident = sum(node.value is not None for node, _ in steps)
        self._pin(prefetch, [node for node, _ in steps[:num_resident]])
        pieces = self._pieces(steps[num_resident:])
        slack_s = self.turns.wait_s(num_ahead) if prefetch.turn_s is None else 0.0
        terms = {"slack_s": slack_s, "congestion": self._congestion(prefetch)}
        num_wanted = num_worth_loading(pieces, self.costs, waits={Tier.SSD: self._reads_s(prefetch)}, **terms)
        for node, _ in steps[num_resident : num_resident + num_wanted]:
            if node.id in self.nodes and not self._fetch(prefetch, node):  # the room for those before may have been its
                break
        if num_wanted:
            self._set_max_wait(prefetch, pieces[:num_wanted])
        self._explore([node for node, _ in steps[num_resident + num_wanted :]])
        if not prefetch.is_waiting and num_wanted == len(pieces) and len(steps) == len(known):
            self._look_up(prefetch, key, steps)
        num_cached = sum(matched for _, matched in steps[:num_resident])
        num_holes = sum(matched - copy.num_slots for copy, matched in _copies(steps[num_resident:][:num_wanted]))
        prefetch.num_needed = max(0, len(key) + self.page_size - num_cached - max(0, num_holes))

    def _pin(self: Any, prefetch: Prefetch, resident: list[Any]) -> None:
        """Keep what the request will use on the GPU there, within ``MOST_PINNED_SHARE``."""
        last = resident[-1] if resident else None
        if prefetch.pinned is last:
            return
        self._unpin(prefetch)
        num_new = sum(num_slots(node) for node in resident if node.lock_ref == 0)
        most = MOST_PINNED_SHARE * self.token_to_kv_pool_allocator.size
        if last is not None and self.pinned_slots + num_new <= most:
            prefetch.pinned = last
            self.pins[id(prefetch)] = num_new
            self.pinned_slots += num_new
            self.inc_lock_ref(last)

    def _unpin(self: Any, prefetch: Prefetch) -> None:
        if prefetch.pinned is not None:
            self.dec_lock_ref(prefetch.pinned)
            self.pinned_slots -= self.pins.pop(id(prefetch))
            prefetch.pinned = None

    def _reserve(self: Any, prefetch: Prefetch, node: Any) -> None:
        """Keep what a request will load from being pushed down again before: the policy thinks of more distant uses.
        Not when so much is held already that reads could find no room."""
        if node.id in prefetch.reserved:
            return
        if node.kv.num_prefetches == 0:
            copy = node.kv.copies.get(Tier.HOST)  # else it is being read, and there is room for it
            # What was read for the first could go again.
            if copy is not None and not self._is_first(prefetch) and not self._may_reserve(copy.entry):
                return
            self.prefetch_nodes[node.id] = None
        prefetch.reserved[node.id] = node
        node.kv.num_prefetches += 1
        self.changes.changed(node)

    def _is_first(self: Any, prefetch: Prefetch) -> bool:
        return next(iter(self.prefetches.values()), None) is prefetch

    def _may_reserve(self: Any, entry: HostEntry | SsdEntry) -> bool:
        """True if waiting requests may hold one more entry on the host."""
        entries = self._prefetch_entries()
        entries[id(entry)] = entry
        num_bytes = sum(entry.header.payload_bytes for entry in entries.values())
        return bool(num_bytes <= MOST_PREFETCH_SHARE * self.host.num_bytes)

    def _prefetch_entries(self: Any) -> dict[int, Any]:
        """What waiting requests hold on the host, and what is being read, whose memory is taken; by ``id``."""
        entries: dict[int, Any] = {id(read.entry): read.entry for read in self.ssd_io.reads}
        for node_id in self.prefetch_nodes:
            node = self.nodes.get(node_id)
            copy = None if node is None else node.kv.copies.get(Tier.HOST)
            if copy is not None:
                entries[id(copy.entry)] = copy.entry
        return entries

    def _release(self: Any, prefetch: Prefetch) -> None:
        for node in prefetch.reserved.values():
            node.kv.num_prefetches -= 1
            if node.kv.num_prefetches == 0:
                del self.prefetch_nodes[node.id]
                if node.id in self.nodes:
                    self.changes.changed(node)
        prefetch.reserved.clear()
        self._unpin(prefetch)

    def release_from_tail(self: Any, until: Any = None) -> Iterator[None]:
        """Whoever runs needs the room more than those who wait: what these hold is given up, that of the last in turn
        first, down to the request ``until``; a step for each who held anything."""
        for prefetch in list(self.prefetches.values())[::-1]:
            if prefetch.req is until:
                return
            if prefetch.reserved or prefetch.pinned is not None:
                self._release(prefetch)
                yield

    @property
    def prefetch_bytes(self: Any) -> int:
        """Host memory that waiting requests hold, or will once it is read."""
        return sum(entry.header.payload_bytes for entry in self._prefetch_entries().values())

    def split_reserved(self: Any, upper: Any, lower: Any) -> None:
        """``upper`` was split off ``lower``: both are held by whoever held that."""
        if lower.kv.num_prefetches:
            upper.kv.num_prefetches, self.prefetch_nodes[upper.id] = lower.kv.num_prefetches, None
            for prefetch in self.prefetches.values():
                if lower.id in prefetch.reserved:
                    prefetch.reserved[upper.id] = upper

    def _fetch(self: Any, prefetch: Prefetch, node: Any) -> bool:
        """Begin what makes the node ready; False where that cannot begin yet."""
        self._tick += 1
        node.kv.last_use = self._tick  # else what was just read were the least recently used, and the first to go
        self.on_node_used(node)
        copy = node.kv.copies.get(Tier.HOST)
        job: Job | None = None
        if copy is None:
            job = self._read_for(prefetch, node.kv.copies[Tier.SSD].entry)
            if job is None:
                return False
        elif not _is_verified(node, VERIFIED_S):
            job = self.start_check(copy.entry)
        if job is not None:
            prefetch.jobs.append(job)
        if node.id in self.nodes:
            self._reserve(prefetch, node)
        return True

    def _read_for(self: Any, prefetch: Prefetch, entry: Any) -> Any:
        """The job that reads an SSD entry for a request; None where it cannot begin now: then the prefetch says for
        want of what, unless nothing is on its way that would give room."""
        if entry.read is None and not self._is_first(prefetch):
            is_early = prefetch.turn_s is None and len(self.ssd_io.reads) >= MOST_READS
            if is_early or not self._may_reserve(entry):
                prefetch.short_of = "turn"
                return None
        read = self.ssd_io.start_read(entry)
        if read is not None:
            prefetch.from_ssd.add(read.host)
            return read
        if prefetch.refused_by is None:
            prefetch.refused_by = self.num_host_plans
        if self.is_freeing_host or self.num_host_plans <= prefetch.refused_by + 1:
            prefetch.short_of = "host_room"  # else the plan that followed has found nothing to write
        else:
            prefetch.is_without_room = True
        return read

    @property
    def is_freeing_host(self: Any) -> bool:
        """True if host memory will become free of itself."""
        return bool(self.ssd_io.reads) or any(self.workers[name].num_pending for name in ("copy", "write", "load"))

    def start_check(self: Any, entry: HostEntry) -> Job:
        """The job that verifies a host entry, or fills it."""
        if entry.arrival is not None:
            arrival: Job = entry.arrival
            return arrival
        if entry.check is None:
            entry.check = Check(self, entry)
            entry.check.start()
        job: Job = entry.check
        return job

    def _explore(self: Any, unwanted: list[Any]) -> None:
        """Now and then read an SSD entry that is taken to come too late, with nobody waiting for it: a disk that was
        slow once would otherwise never be seen to be fast again."""
        now = time.perf_counter()
        for node in unwanted:
            copy = node.kv.copies.get(Tier.SSD)
            if now - self.ssd_io.seen_s < EXPLORE_S or node.id not in self.nodes:
                return
            if copy is not None and Tier.HOST not in node.kv.copies and self.ssd_io.start_read(copy.entry) is not None:
                self.ssd_io.note_seen(now)

    def _reads_s(self: Any, prefetch: Prefetch) -> float:
        """Seconds that the reads begun for others are predicted to take: the disk does those first."""
        others = sum(read.num_bytes for read in self.ssd_io.reads if read not in prefetch.jobs)
        return self.costs.load_seconds(Tier.SSD, others) if others else 0.0

    def _set_max_wait(self: Any, prefetch: Prefetch, pieces: list[Piece]) -> None:
        load_s = self._reads_s(prefetch)
        load_s += sum(self.costs.load_seconds(piece.tier, piece.num_bytes) for piece in pieces)
        recompute_s = sum(self.costs.prefill.marginal_seconds(piece.num_tokens, piece.depth_tokens) for piece in pieces)
        prefetch.max_wait_s = max(prefetch.max_wait_s, deadline_s(load_s, self._congestion(prefetch) * recompute_s))


def _is_verified(node: Any, seconds: float) -> bool:
    """True if the host has the node in an entry that was good so shortly before."""
    copy = node.kv.copies.get(Tier.HOST)
    return copy is not None and copy.entry.checked_s >= time.perf_counter() - seconds


def _copies(steps: list[tuple[Any, int]]) -> Iterator[tuple[Copy, int]]:
    """The fastest copy of each node, and the tokens that are matched of it."""
    for node, matched in steps:
        if node.kv.copies:
            yield node.kv.copies[min(node.kv.copies)], matched


class Check(Job):
    """Verifies a host entry, on a thread that no SSD holds up."""

    rank = 0

    def __init__(self, cache: Any, entry: HostEntry) -> None:
        super().__init__()
        self.cache, self.entry = cache, entry

    def start(self) -> None:
        self.cache.host.pin(self.entry)
        self.cache.workers["check"].submit(self)

    def run(self) -> None:
        self.cache.host.check(self.entry)

    def finish(self) -> None:
        cache, entry = self.cache, self.entry
        entry.check = None
        entry.check_seconds = self.seconds
        if self.error is not None:
            for node in [cache.nodes.get(node_id) for node_id in sorted(entry.owners)]:
                if node is not None and node.id in cache.nodes:
                    cache.removal.invalidate_copy(node, Tier.HOST, self.error)
        cache.host.unpin(entry)
