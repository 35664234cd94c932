"""Getting what a waiting request will use ready for loading: SSD entries are read, host entries are verified.

The scheduler passes a request over while that goes on, until it is done, or late: then the request takes what is ready
and computes the rest. Whether it is begun at all is the cost model's choice: nothing is loaded that is predicted to be
computed sooner.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.core import Tier
from sglang_evicpress.layout import SurvivorLayout
from sglang_evicpress.patches.node import first_outside, servable_steps, start_of
from sglang_evicpress.patches.ssd_moves import Lookup
from sglang_evicpress.policy.loading import Piece, deadline_s, num_worth_loading
from sglang_evicpress.tiers.copies import Copy, HostEntry
from sglang_evicpress.tiers.identity import PathHash, edge_of, namespace_digest, token_bytes
from sglang_evicpress.tiers.payload import layout_of
from sglang_evicpress.tiers.worker import Job

RECENT_S = 1.0
"""A host entry that was verified so shortly before is not verified again, nor is a stage opened again."""

EXPLORE_S = 10.0
"""After so long without a read from the SSD one is made to see what it costs."""

MOST_STAGED_SHARE = 1 / 2
"""Of the host tier: what waiting requests may hold there."""

MOST_ROUNDS = 3
"""How often the stage of one request is opened."""


class Stage:
    """What is got ready for one waiting request. ``from_ssd``: the entries that came from the SSD for it; ``held``: the
    nodes that stay where they are for it, by id. It may be opened again: what was ready may have gone
    while the request still waited."""

    __slots__ = (
        "begin_s",
        "deadline_s",
        "from_ssd",
        "held",
        "is_over",
        "jobs",
        "looked_at",
        "num_rounds",
        "over_s",
        "req",
    )

    def __init__(self, req: Any) -> None:
        self.req = req
        self.num_rounds = 0
        self.open()
        self.jobs: list[Job] = []
        self.from_ssd: set[HostEntry] = set()
        self.held: dict[int, Any] = {}
        self.looked_at: set[int] = set()

    def open(self) -> None:
        self.begin_s = time.perf_counter()
        self.deadline_s: float | None = None
        self.is_over = False
        self.over_s = 0.0
        self.num_rounds += 1

    def end(self) -> None:
        self.is_over = True
        self.over_s = time.perf_counter()


class Staging:
    """The part of EvicPressCache that stages. Everything here runs on the scheduler thread."""

    def open_stages(self: Any) -> None:
        self.stages: dict[int, Stage] = {}
        self.reads: dict[Any, None] = {}  # from the SSD, now
        self.staged: dict[int, int] = {}  # bytes of the nodes that are held, by id
        self.ssd_seen_s = time.perf_counter()

    def begin_stage(self: Any, req: Any) -> None:
        """A request has entered the waiting queue."""
        if self.host is None or self.disable:
            return
        stage = self.stages[id(req)] = Stage(req)
        self._advance(stage)

    def is_staging(self: Any, req: Any) -> bool:
        """Whether a waiting request is to be passed over for now."""
        stage = self.stages.get(id(req))
        if stage is None:
            return False
        if stage.is_over:
            if stage.num_rounds >= MOST_ROUNDS or time.perf_counter() - stage.over_s < RECENT_S:
                return False
            stage.open()
        self._advance(stage)
        return not stage.is_over

    def advance_stages(self: Any) -> None:
        for stage in list(self.stages.values()):
            if not stage.is_over:
                self._advance(stage)

    def keep_stages(self: Any, waiting: Collection[Any]) -> None:
        """Forget the stages of requests that do not wait any more."""
        if len(self.stages) > len(waiting):
            ids = {id(req) for req in waiting}
            for key in [key for key in self.stages if key not in ids]:
                self._let_go(self.stages.pop(key))

    @property
    def num_staging(self: Any) -> int:
        return sum(not stage.is_over for stage in self.stages.values())

    def ready_to_load(self: Any, req: Any, steps: list[tuple[Any, int]], num_resident: int) -> int:
        """How many of ``steps``, from the first that is not on the GPU, are verified on the host and worth loading."""
        stage = self.stages.get(id(req))
        if stage is None:
            return 0
        count = num_resident
        while count < len(steps) and self._is_ready(stage, steps[count][0]):
            count += 1
        return num_worth_loading(self._pieces(steps[num_resident:count]), self.costs)

    def _is_ready(self: Any, stage: Stage, node: Any) -> bool:
        copy = node.kv.copies.get(Tier.HOST)
        return copy is not None and copy.entry.checked_s >= stage.begin_s - RECENT_S

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

    def _advance(self: Any, stage: Stage) -> None:
        """Begin whatever the request still needs and is worth it; over when there is nothing more, or at its
        deadline."""
        if stage.deadline_s is not None and time.perf_counter() > stage.deadline_s:
            stage.end()
            stage.num_rounds = MOST_ROUNDS
            self.tier_counts["stages_late"] += 1
            return
        lookups = [job for job in stage.jobs if isinstance(job, Lookup)]
        if any(not job.is_finished for job in stage.jobs):
            return
        stage.jobs = []
        for job in lookups:
            self._graft(stage, job)
        key = self.key_of_waiting(stage.req)
        known = self._steps(key)
        steps = known[: servable_steps(known, self.config.min_share)]
        num_resident = sum(node.value is not None for node, _ in steps)
        pieces = self._pieces(steps[num_resident:])
        num_wanted = num_worth_loading(pieces, self.costs, waits={Tier.SSD: self._reads_s(stage)})
        for node, _ in steps[num_resident : num_resident + num_wanted]:
            if node.id in self.nodes:  # the room for those before it may have been its own
                self._fetch(stage, node)
        if num_wanted:
            self._set_deadline(stage, pieces[:num_wanted])
        self._explore([node for node, _ in steps[num_resident + num_wanted :]])
        if not stage.jobs and num_wanted == len(pieces) and len(steps) == len(known):
            self._look_up(stage, key, steps)
        if not stage.jobs:
            stage.end()

    def _hold(self: Any, stage: Stage, node: Any) -> None:
        """Keep what a request will load from being pushed down again before: the policy thinks of more distant uses.
        Not when so much is held already that reads could find no room."""
        if node.id in stage.held:
            return
        if node.kv.num_stages == 0:
            num_bytes = node.kv.copies[max(node.kv.copies)].num_slots * self.menu.slot_bytes
            if self.staged_bytes + num_bytes > MOST_STAGED_SHARE * self.host.num_bytes:
                return
            self.staged[node.id] = num_bytes
        stage.held[node.id] = node
        node.kv.num_stages += 1
        self.note(node)

    def _let_go(self: Any, stage: Stage) -> None:
        for node in stage.held.values():
            node.kv.num_stages -= 1
            if node.kv.num_stages == 0:
                del self.staged[node.id]
                if node.id in self.nodes:
                    self.note(node)
        stage.held.clear()

    def let_go_all(self: Any) -> None:
        """Whoever runs needs the room more than those who wait."""
        for stage in self.stages.values():
            self._let_go(stage)

    @property
    def staged_bytes(self: Any) -> int:
        """What waiting requests hold below the GPU."""
        return sum(self.staged.values())

    def split_held(self: Any, upper: Any, lower: Any) -> None:
        """``upper`` was split off ``lower``: both are held by whoever held that."""
        if lower.kv.num_stages:
            upper.kv.num_stages, self.staged[upper.id] = lower.kv.num_stages, 0
            for stage in self.stages.values():
                if lower.id in stage.held:
                    stage.held[upper.id] = upper

    def _fetch(self: Any, stage: Stage, node: Any) -> None:
        self._tick += 1
        node.kv.last_use = self._tick  # else what was just read were the least recently used, and the first to go
        self.note_use(node)
        copy = node.kv.copies.get(Tier.HOST)
        job: Job | None = None
        if copy is None:
            read = self.start_read(node.kv.copies[Tier.SSD].entry)
            if read is not None:
                job = read
                stage.from_ssd.add(read.host)
        elif not self._is_ready(stage, node):
            if copy.entry.check is None:
                copy.entry.check = Check(self, copy.entry)
                copy.entry.check.start()
            job = copy.entry.check
        if job is not None:
            stage.jobs.append(job)
        if node.id in self.nodes and (copy is not None or job is not None):
            self._hold(stage, node)

    def _explore(self: Any, unwanted: list[Any]) -> None:
        """Now and then read an SSD entry that is taken to come too late, with nobody waiting for it: a disk that was
        slow once would otherwise never be seen to be fast again."""
        now = time.perf_counter()
        for node in unwanted:
            copy = node.kv.copies.get(Tier.SSD)
            if now - self.ssd_seen_s < EXPLORE_S or node.id not in self.nodes:
                return
            if copy is not None and Tier.HOST not in node.kv.copies and self.start_read(copy.entry) is not None:
                self.ssd_seen_s = now

    def _reads_s(self: Any, stage: Stage) -> float:
        """Seconds that the reads begun for others are predicted to take: the disk does those first."""
        others = sum(read.num_bytes for read in self.reads if read not in stage.jobs)
        return self.costs.load_seconds(Tier.SSD, others) if others else 0.0

    def _set_deadline(self: Any, stage: Stage, pieces: list[Piece]) -> None:
        load_s = self._reads_s(stage)
        load_s += sum(self.costs.load_seconds(piece.tier, piece.num_bytes) for piece in pieces)
        recompute_s = sum(self.costs.prefill.marginal_seconds(piece.num_tokens, piece.depth_tokens) for piece in pieces)
        if stage.deadline_s is None:
            stage.deadline_s = stage.begin_s
        stage.deadline_s = max(stage.deadline_s, stage.begin_s + deadline_s(load_s, recompute_s))

    # ---- entries of an earlier server

    def _look_up(self: Any, stage: Stage, key: RadixKey, steps: list[tuple[Any, int]]) -> None:
        """Ask the SSD for entries that continue the path where the tree ends."""
        begin = sum(matched for _, matched in steps)
        if self.ssd is None or begin in stage.looked_at or len(key) - begin < self.page_size:
            return
        stage.looked_at.add(begin)
        if not self.ssd.store.num_entries:
            return
        scope = self.ssd_scope(key.extra_key)
        if scope is None:
            return
        tokens = key.token_ids[: len(key)]
        if first_outside(tokens, self.vocab_size) is not None:
            return  # nothing of it was ever written
        hashed = PathHash(*scope)
        hashed.update(tokens[:begin])
        refs = self.ssd.store.find(edge_of(hashed.key, tokens[begin : begin + self.page_size]))
        refs = [ref for ref in refs if not self.ssd.is_held(ref)]
        if not refs:
            return
        num_tokens = min(max(ref.num_tokens for ref in refs), len(key) - begin)
        pieces = [Piece(num_tokens, begin, Tier.SSD, num_tokens * self.menu.slot_bytes)]
        if num_worth_loading(pieces, self.costs) == 0:
            return
        self._set_deadline(stage, pieces)
        job = Lookup(self, refs, token_bytes(tokens[begin:]), hashed.key, namespace_digest(scope.namespace))
        self.workers["read"].submit(job)
        stage.jobs.append(job)

    def _graft(self: Any, stage: Stage, job: Lookup) -> None:
        """Put what a lookup has found into the tree, if it still continues a path there."""
        if job.found is None or job.error is not None or job.ssd is not self.ssd:
            return
        ref, header = job.found
        if self.ssd.is_held(ref) or ref not in self.ssd.store:
            return
        key = self.key_of_waiting(stage.req)
        ahead = key.token_ids[: len(key)][header.start :][: len(job.tokens) // 4]
        if first_outside(ahead, self.vocab_size) is not None or token_bytes(ahead) != job.tokens:
            return
        steps = self._steps(key)
        if sum(matched for _, matched in steps) != header.start:
            return
        path = self._take(steps)
        parent = path[-1] if path else self.root_node
        tokens = key.token_ids[:0]
        tokens.extend(int.from_bytes(header.tokens[i : i + 4], "little") for i in range(0, len(header.tokens), 4))
        found = RadixKey(tokens, key.extra_key)
        is_new = found.child_key(self.page_size) not in parent.children
        if not is_new or not parent.kv.is_text or first_outside(tokens, self.vocab_size) is not None:
            return
        layout = None
        if job.survivors is not None:
            numbers = torch.frombuffer(bytearray(job.survivors), dtype=torch.uint8)
            layout = layout_of(numbers, header.shape, header.num_slots)
            if _repeats(path, layout):
                return
        copy = Copy(
            Tier.SSD, header.form, self.ssd.hold(ref, header), 0, header.num_slots, layout, header.is_lossy_prefix, None
        )
        self.add_absent_leaf(parent, found, copy)
        self.tier_counts["found_again"] += 1


def _repeats(path: list[Any], layout: SurvivorLayout) -> bool:
    """Whether survivors behind a path are of positions that the path holds itself in the same head: the entry is the
    lower part of a node that was split after it was compressed, and the path holds other KV now (see drop_strays)."""
    positions = layout.positions
    for node in path:
        begin = start_of(node)
        if node.kv.layout is None:
            if bool(((positions >= begin) & (positions < begin + len(node.key))).any()):
                return True
            continue
        for held, survivors in zip(node.kv.layout.positions.flatten(0, 1), positions.flatten(0, 1), strict=True):
            if bool(torch.isin(survivors, held).any()):
                return True
    return False


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
                    cache.lose_copy(node, Tier.HOST, self.error)
        cache.host.unpin(entry)
