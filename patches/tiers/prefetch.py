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

MOST_STAGED_SHARE = 1 / 2
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


class Stage:
    """Prefetch for one waiting request. ``from_ssd``: the entries that came from the SSD for it; ``held``: the
    nodes below the GPU that stay where they are for it, by id; ``pinned``: the last node on the GPU that does, with all
    above it. ``turn_s``: when it could first have run, and ``patience_s`` from then on it may be passed over.
    ``num_to_run``: slots that it needs besides what is on the GPU. ``short_of``: for want of what something is not
    begun yet; ``is_without_room``: there was no host memory for a read, nor any to be expected.
    """

    __slots__ = (
        "from_ssd",
        "held",
        "is_late",
        "is_without_room",
        "jobs",
        "looked_at",
        "looked_s",
        "num_needed",
        "num_to_run",
        "patience_s",
        "pinned",
        "refused_by",
        "req",
        "short_of",
        "turn_s",
    )

    def __init__(self, req: Any) -> None:
        self.req = req
        self.turn_s: float | None = None
        self.patience_s = self.looked_s = 0.0
        self.is_late = self.is_without_room = False
        self.short_of: str | None = None
        self.jobs: list[Job] = []
        self.from_ssd: set[HostEntry] = set()
        self.held: dict[int, Any] = {}
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


class Staging:
    """The part of EvicPressCache that stages. Everything here runs on the scheduler thread. ``stages`` are in the order
    in which the requests came, which is that of their turns where SGLang serves first come, first served."""

    def open_stages(self: Any) -> None:
        self.stages: dict[int, Stage] = {}
        self.staged: dict[int, None] = {}  # nodes that are held, by id
        self.pins: dict[int, int] = {}  # slots that were locked for a stage, by its id()
        self.pinned_slots = 0
        self.congestion = Congestion()
        self.num_ready = 0  # requests at the head of the queue for which nothing is on its way

    def begin_stage(self: Any, req: Any) -> None:
        """A request has entered the waiting queue."""
        if self.host is None or self.disable:
            return
        former = self.stages.pop(id(req), None)
        if former is not None:
            self._let_go(former)
        num_ahead = len(self.stages)
        stage = self.stages[id(req)] = Stage(req)
        if num_ahead < WINDOW:
            self._advance(stage, num_ahead)

    def is_staging(self: Any, req: Any, *, has_turn: bool = True) -> bool:
        """True if a waiting request is to be passed over for now. ``has_turn``: it could run, were it not for that;
        else what it waits for makes nobody wait for it."""
        stage = self.stages.get(id(req))
        if stage is None:
            return False
        now = time.perf_counter()
        if stage.turn_s is None and not has_turn:
            return stage.is_waiting or not stage.looked_s
        if stage.turn_s is None:
            stage.turn_s = now
        if stage.is_late:
            return False  # what else comes is of use if there is no room for the request now
        self._advance(stage, 0)
        if not stage.is_waiting:
            return False
        if now <= stage.turn_s + stage.patience_s:
            return True
        stage.is_late = True
        self.storage.counts["stages_late"] += 1
        return False

    def is_passed_over(self: Any, req: Any) -> bool:
        """True if the request could run and nothing new can be said of it: SGLang need not even look it up."""
        stage = self.stages.get(id(req))
        if stage is None or stage.turn_s is None or not stage.has_unfinished_jobs:
            return False
        return time.perf_counter() <= stage.turn_s + stage.patience_s

    def advance_stages(self: Any) -> None:
        """Go on with the requests at the head of the queue, the first first."""
        now = time.perf_counter()
        num_ready = 0
        for num_ahead, stage in enumerate(list(islice(self.stages.values(), WINDOW))):
            if stage.jobs or now - stage.looked_s >= RELOOK_S:
                self._advance(stage, num_ahead)
            num_ready += not stage.is_waiting
        self.congestion.observe(now, self.num_ready)
        self.num_ready = num_ready

    def keep_stages(self: Any, waiting: Collection[Any]) -> None:
        """Forget the stages of requests that do not wait any more."""
        if len(self.stages) > len(waiting):
            ids = {id(req) for req in waiting}
            for key in [key for key in self.stages if key not in ids]:
                self._let_go(self.stages.pop(key))

    @property
    def num_staging(self: Any) -> int:
        return sum(stage.is_waiting for stage in self.stages.values())

    @property
    def num_slots_needed(self: Any) -> int:
        """Slots that the next requests will take."""
        return sum(stage.num_needed for stage in islice(self.stages.values(), WINDOW))

    def ready_to_load(self: Any, req: Any, steps: list[tuple[Any, int]], num_resident: int) -> int:
        """Number of ``steps``, from the first not on the GPU, that are verified on the host and worth loading."""
        stage = self.stages.get(id(req))
        if stage is None:
            return 0
        count = num_resident
        while count < len(steps) and _is_verified(steps[count][0], 2 * VERIFIED_S):
            count += 1
        return num_worth_loading(
            self._pieces(steps[num_resident:count]), self.costs, congestion=self._congestion(stage)
        )

    def _congestion(self: Any, stage: Stage) -> float:
        """Factor by which a second of computing counts: others that are ready wait for it, and those for whom something
        is being read are ready after half of it, as likely as not."""
        num_ready = max(0, self.num_ready - (not stage.is_waiting))
        num_soon = sum(read not in stage.jobs for read in self.ssd_io.reads)
        return min(MOST_CONGESTION, 1.0 + num_ready + num_soon / 2)

    def _pieces(self: Any, steps: list[tuple[Any, int]]) -> list[Piece]:
        found, read = [], set()
        depth = 0 if not steps else start_of(steps[0][0])
        for node, matched in steps:
            tier = Tier.HOST if Tier.HOST in node.kv.copies else Tier.SSD
            copy = node.kv.copies[tier]
            num_bytes = copy.num_slots * self.menu.slot_bytes
            if tier == Tier.SSD:  # all of an entry is read for any piece of it, once
                num_bytes = 0 if copy.entry in read else copy.entry.header.payload_bytes
                read.add(copy.entry)
            found.append(Piece(matched, depth, tier, num_bytes))
            depth += matched
        return found

    def _advance(self: Any, stage: Stage, num_ahead: int) -> None:
        """Take in what is done, and begin whatever the request still needs and is worth it."""
        if stage.has_unfinished_jobs:
            return
        lookups = [job for job in stage.jobs if isinstance(job, Lookup)]
        stage.jobs, stage.short_of, stage.looked_s = [], None, time.perf_counter()
        for job in lookups:
            self._graft(stage, job)
        key = self.key_of_waiting(stage.req)
        known = self._steps(key)
        steps = known[: servable_steps(known, self.config.min_share)]
        num_resident = sum(node.value is not None for node, _ in steps)
        self._pin(stage, [node for node, _ in steps[:num_resident]])
        pieces = self._pieces(steps[num_resident:])
        slack_s = self.turns.wait_s(num_ahead) if stage.turn_s is None else 0.0
        terms = {"slack_s": slack_s, "congestion": self._congestion(stage)}
        num_wanted = num_worth_loading(pieces, self.costs, waits={Tier.SSD: self._reads_s(stage)}, **terms)
        for node, _ in steps[num_resident : num_resident + num_wanted]:
            if node.id in self.nodes and not self._fetch(stage, node):  # the room for those before may have been its
                break
        if num_wanted:
            self._set_patience(stage, pieces[:num_wanted])
        self._explore([node for node, _ in steps[num_resident + num_wanted :]])
        if not stage.is_waiting and num_wanted == len(pieces) and len(steps) == len(known):
            self._look_up(stage, key, steps)
        num_cached = sum(matched for _, matched in steps[:num_resident])
        num_holes = sum(matched - copy.num_slots for copy, matched in _copies(steps[num_resident:][:num_wanted]))
        stage.num_needed = max(0, len(key) + self.page_size - num_cached - max(0, num_holes))

    def _pin(self: Any, stage: Stage, resident: list[Any]) -> None:
        """Keep what the request will use on the GPU there, within ``MOST_PINNED_SHARE``."""
        last = resident[-1] if resident else None
        if stage.pinned is last:
            return
        self._unpin(stage)
        num_new = sum(num_slots(node) for node in resident if node.lock_ref == 0)
        most = MOST_PINNED_SHARE * self.token_to_kv_pool_allocator.size
        if last is not None and self.pinned_slots + num_new <= most:
            stage.pinned = last
            self.pins[id(stage)] = num_new
            self.pinned_slots += num_new
            self.inc_lock_ref(last)

    def _unpin(self: Any, stage: Stage) -> None:
        if stage.pinned is not None:
            self.dec_lock_ref(stage.pinned)
            self.pinned_slots -= self.pins.pop(id(stage))
            stage.pinned = None

    def _hold(self: Any, stage: Stage, node: Any) -> None:
        """Keep what a request will load from being pushed down again before: the policy thinks of more distant uses.
        Not when so much is held already that reads could find no room."""
        if node.id in stage.held:
            return
        if node.kv.num_stages == 0:
            copy = node.kv.copies.get(Tier.HOST)  # else it is being read, and there is room for it
            # What was read for the first could go again.
            if copy is not None and not self._is_first(stage) and not self._may_hold(copy.entry):
                return
            self.staged[node.id] = None
        stage.held[node.id] = node
        node.kv.num_stages += 1
        self.changes.changed(node)

    def _is_first(self: Any, stage: Stage) -> bool:
        return next(iter(self.stages.values()), None) is stage

    def _may_hold(self: Any, entry: HostEntry | SsdEntry) -> bool:
        """True if waiting requests may hold one more entry on the host."""
        entries = self._staged_entries()
        entries[id(entry)] = entry
        num_bytes = sum(entry.header.payload_bytes for entry in entries.values())
        return bool(num_bytes <= MOST_STAGED_SHARE * self.host.num_bytes)

    def _staged_entries(self: Any) -> dict[int, Any]:
        """What waiting requests hold on the host, and what is being read, whose memory is taken; by ``id``."""
        entries: dict[int, Any] = {id(read.entry): read.entry for read in self.ssd_io.reads}
        for node_id in self.staged:
            node = self.nodes.get(node_id)
            copy = None if node is None else node.kv.copies.get(Tier.HOST)
            if copy is not None:
                entries[id(copy.entry)] = copy.entry
        return entries

    def _let_go(self: Any, stage: Stage) -> None:
        for node in stage.held.values():
            node.kv.num_stages -= 1
            if node.kv.num_stages == 0:
                del self.staged[node.id]
                if node.id in self.nodes:
                    self.changes.changed(node)
        stage.held.clear()
        self._unpin(stage)

    def let_go_from_tail(self: Any, until: Any = None) -> Iterator[None]:
        """Whoever runs needs the room more than those who wait: what these hold is given up, that of the last in turn
        first, down to the request ``until``; a step for each who held anything."""
        for stage in list(self.stages.values())[::-1]:
            if stage.req is until:
                return
            if stage.held or stage.pinned is not None:
                self._let_go(stage)
                yield

    @property
    def staged_bytes(self: Any) -> int:
        """Host memory that waiting requests hold, or will once it is read."""
        return sum(entry.header.payload_bytes for entry in self._staged_entries().values())

    def split_held(self: Any, upper: Any, lower: Any) -> None:
        """``upper`` was split off ``lower``: both are held by whoever held that."""
        if lower.kv.num_stages:
            upper.kv.num_stages, self.staged[upper.id] = lower.kv.num_stages, None
            for stage in self.stages.values():
                if lower.id in stage.held:
                    stage.held[upper.id] = upper

    def _fetch(self: Any, stage: Stage, node: Any) -> bool:
        """Begin what makes the node ready; False where that cannot begin yet."""
        self._tick += 1
        node.kv.last_use = self._tick  # else what was just read were the least recently used, and the first to go
        self.note_use(node)
        copy = node.kv.copies.get(Tier.HOST)
        job: Job | None = None
        if copy is None:
            job = self._read_for(stage, node.kv.copies[Tier.SSD].entry)
            if job is None:
                return False
        elif not _is_verified(node, VERIFIED_S):
            job = self.start_check(copy.entry)
        if job is not None:
            stage.jobs.append(job)
        if node.id in self.nodes:
            self._hold(stage, node)
        return True

    def _read_for(self: Any, stage: Stage, entry: Any) -> Any:
        """The job that reads an SSD entry for a request; None where it cannot begin now: then the stage says for want
        of what, unless nothing is on its way that would give room."""
        if entry.read is None and not self._is_first(stage):
            is_early = stage.turn_s is None and len(self.ssd_io.reads) >= MOST_READS
            if is_early or not self._may_hold(entry):
                stage.short_of = "turn"
                return None
        read = self.ssd_io.start_read(entry)
        if read is not None:
            stage.from_ssd.add(read.host)
            return read
        if stage.refused_by is None:
            stage.refused_by = self.num_host_plans
        if self.is_freeing_host or self.num_host_plans <= stage.refused_by + 1:
            stage.short_of = "host_room"  # else the plan that followed has found nothing to write
        else:
            stage.is_without_room = True
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

    def _reads_s(self: Any, stage: Stage) -> float:
        """Seconds that the reads begun for others are predicted to take: the disk does those first."""
        others = sum(read.num_bytes for read in self.ssd_io.reads if read not in stage.jobs)
        return self.costs.load_seconds(Tier.SSD, others) if others else 0.0

    def _set_patience(self: Any, stage: Stage, pieces: list[Piece]) -> None:
        load_s = self._reads_s(stage)
        load_s += sum(self.costs.load_seconds(piece.tier, piece.num_bytes) for piece in pieces)
        recompute_s = sum(self.costs.prefill.marginal_seconds(piece.num_tokens, piece.depth_tokens) for piece in pieces)
        stage.patience_s = max(stage.patience_s, deadline_s(load_s, self._congestion(stage) * recompute_s))


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
                    cache.removal.lose_copy(node, Tier.HOST, self.error)
        cache.host.unpin(entry)
