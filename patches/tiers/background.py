"""Keeping room free ahead of need: what is taken next is copied below before it is due, and released between two
watermarks, so that evicting normally only frees."""

from __future__ import annotations

import time
from typing import Any

from sglang_evicpress.core import Option, Tier
from sglang_evicpress.patches.tree.node import is_lossy, start_of
from sglang_evicpress.tiers.entry.payload import PayloadCopier
from sglang_evicpress.tiers.host.tier import HostTier
from sglang_evicpress.tiers.ssd.tier import SsdTier

AHEAD_SHARE = 1 / 4  # of the pool, and of the host tier, that is taken next: copied before it is due
HOST_AHEAD_SHARE = 1 / 2  # of the host tier where writing costs nothing but time: then a read need not wait for writes
MOST_NEEDED_SHARE = 1 / 4  # of the pool: what is kept free for the next requests
# of the host tier, without and with an SSD below: for such copies at most
REDUNDANT_SHARE = {False: 1 / 4, True: 1 / 2}
LOW_SHARE, HIGH_SHARE = 1 / 32, 1 / 16  # of the pool: below the first, nodes are released until the second is free
HOST_LOW_SHARE, HOST_HIGH_SHARE = 1 / 16, 1 / 8  # the same of the host tier
SSD_LOW_SHARE, SSD_HIGH_SHARE = 1 / 32, 1 / 16  # the same of the SSD tier
PLAN_SHARE = 1 / 20  # of the time, for plans in the background


class BackgroundDemotion:
    """The part of EvicPressCache that works in the background. Everything here runs on the scheduler thread."""

    def open_background(self: Any) -> None:
        self.planned: frozenset[int] = frozenset()  # nodes that the last look ahead would have leave the GPU
        self.num_host_plans = 0
        self._is_dirty = False
        self._next_plan_s = 0.0
        self.busy_s = 0.0  # when a request last ran or waited, time.monotonic

    def tick(self: Any, *, is_idle: bool = False) -> None:
        """Between two steps of the scheduler: take in what the threads have done, and keep room free; ``is_idle``: no
        request runs or waits."""
        if self.host is None:
            return
        self.arrival.clear()
        self.start_loads(None)  # of a round that has come to no batch
        self.ssd_io.begin_round()
        jobs = [job for workers in self.workers.values() for job in workers.finished()]
        for job in jobs:
            job.finish()
            self._is_dirty = True
        now = time.monotonic()
        if not is_idle:
            self.busy_s = now
        if self._is_dirty and (is_idle or now >= self._next_plan_s):
            self._is_dirty = False
            self._keep_ssd_room()
            self.keep_host_room()
            self._keep_gpu_room()
            took = time.monotonic() - now
            self._next_plan_s = now + took / PLAN_SHARE
        elif is_idle:
            self.promote()
        self.advance_prefetches()

    def mark_dirty(self: Any, *, at_once: bool = False) -> None:
        """Something has changed that may call for room; ``at_once``: somebody waits for it."""
        self._is_dirty = True
        if at_once:
            self._next_plan_s = 0.0

    @property
    def has_work(self: Any) -> bool:
        """True if there is more to be done than to wait for requests."""
        return self._is_dirty or self.storage.num_pending_jobs > 0 or bool(self.promoting)

    @property
    def num_pending_jobs(self: Any) -> int:
        return int(self.storage.num_pending_jobs)

    @property
    def host(self: Any) -> HostTier | None:
        return self.storage.host if self.storage.has_host else None

    @property
    def copier(self: Any) -> PayloadCopier:
        return self.storage.copier

    @property
    def ssd(self: Any) -> SsdTier | None:
        return self.storage.ssd

    @property
    def tiers(self: Any) -> tuple[Tier, ...]:
        return self.storage.tiers

    def _keep_gpu_room(self: Any) -> None:
        allocator = self.token_to_kv_pool_allocator
        slot_bytes, free = self.menu.slot_bytes, allocator.available_size()
        needed = min(self.num_slots_needed, int(MOST_NEEDED_SHARE * allocator.size))
        if free < max(LOW_SHARE * allocator.size, needed):
            wanted = min(max(int(HIGH_SHARE * allocator.size), needed) - free, self.ledger.evictable)
            self.controller.free_bytes(
                Tier.GPU, self.plans.bounded(Tier.GPU, wanted * slot_bytes), room=self.host_room.room()
            )
        ahead = min(
            int(AHEAD_SHARE * allocator.size),
            int(REDUNDANT_SHARE[self.ssd is not None] * self.host.num_bytes) // slot_bytes,
        )
        ahead = min(ahead - allocator.available_size(), self.ledger.evictable)
        if ahead <= 0:
            self._plan_to_leave([])
            return
        decisions = self.planner.plan(Tier.GPU, self.plans.bounded(Tier.GPU, ahead * slot_bytes), self.host_room.room())
        self._plan_to_leave([one.node_id for one in decisions if one.option.tier in (Tier.HOST, Tier.SSD)])
        for decision in decisions:
            node = self.nodes.get(decision.node_id)  # None: it had to make room on the host
            is_here = node is not None and node.value is not None and node.kv.job is None
            if is_here and not self._prepare(node, decision.option):
                break

    def _plan_to_leave(self: Any, node_ids: list[int]) -> None:
        """These are to leave the GPU soon, the first first; what they have on the host is given up last."""
        self.planned = frozenset(node_ids)
        self.placement.plan_to_leave(node_ids)

    def _prepare(self: Any, node: Any, option: Option) -> bool:
        """See that a node can become, without waiting, what it is to be soon. False when there is no room for it.

        What is to go to the host in a smaller form is copied as it is first and compressed there; until it leaves, the
        GPU has all of it.
        """
        tier, form, kv = option.tier, option.form, node.kv
        if not kv.is_text:
            return True  # it is dropped when it has to go
        if form != kv.form and self.lacks_exact(node):
            return bool(self.backup.start_copy(node, Tier.SSD, keeps_planned=True))
        copy = kv.copies.get(tier)
        if tier == Tier.SSD and not self.adapters.may_reach_ssd(node):
            return True
        if tier is None or tier == Tier.GPU or (copy is not None and (tier == Tier.SSD or not copy.form.is_exact)):
            return True
        if copy is None or (form == kv.form and copy.form != form):
            return bool(self.backup.start_copy(node, tier, keeps_planned=True))
        if form is not None and form != copy.form:
            self.host_compression.compress_on_host(node, form, keeps_planned=True)
        return True

    def _keep_ssd_room(self: Any) -> None:
        self.ssd_io.drop_fragments()
        store = None if self.ssd is None else self.ssd.store
        if store is not None and store.used_bytes > (1 - SSD_LOW_SHARE) * store.capacity_bytes:
            self.ssd_io.make_ssd_room(int(SSD_HIGH_SHARE * store.capacity_bytes))

    def keep_host_room(self: Any) -> None:
        """Below the low watermark of free host memory nodes go on to the SSD, or are dropped, up to the high one, or to
        what was missing last; what is next is written to the SSD ahead."""
        host = self.host
        self.num_host_plans += 1
        self.host_compression.repack()
        free = host.num_bytes - self.plans.held_bytes(Tier.HOST) - self.host_room.copying_bytes - self._prepared_bytes()
        if free < HOST_LOW_SHARE * host.num_bytes or self.host_room.wanted_bytes:
            # Pieces of one entry free it only together, so what is counted as free may not be all that can be had.
            lacking = max(self.host_room.wanted_bytes - host.free_bytes, self.host_room.wanted_bytes // 4)
            wanted = max(int(HOST_HIGH_SHARE * host.num_bytes) - free, lacking)
            self.controller.free_bytes(Tier.HOST, self.plans.bounded(Tier.HOST, wanted), room=self.host_room.room())
        self.host_room.forget_wanted()
        if self.ssd is None:
            return
        share = HOST_AHEAD_SHARE if self.config.ssd_write_gb_per_day is None else AHEAD_SHARE
        ahead = int(share * host.num_bytes) - free
        if ahead <= 0:
            return
        for decision in self.planner.plan(Tier.HOST, self.plans.bounded(Tier.HOST, ahead), self.host_room.room()):
            node = self.nodes.get(decision.node_id)
            if node is None or not self.adapters.may_reach_ssd(node):
                continue  # it had to make room on the SSD, or never goes there
            is_move = decision.option.tier == Tier.SSD and node.value is None
            is_there = self.placement.has_same(node, Tier.SSD)
            if decision.option.form != node.kv.form:  # it is written as it is only to be there if need be
                is_there = Tier.SSD in node.kv.copies
            if is_move and not is_there and not self.backup.start_copy(node, Tier.SSD):
                break

    def _prepared_bytes(self: Any) -> int:
        """Bytes of host copies whose nodes are to leave the GPU soon."""
        copies = (node.kv.copies.get(Tier.HOST) for node_id in self.planned if (node := self.nodes.get(node_id)))
        return sum(copy.num_slots for copy in copies if copy is not None) * int(self.menu.slot_bytes)

    def lacks_exact(self: Any, node: Any) -> bool:
        """True if a node that is about to become lossy should have its exact KV on the SSD first: it is had sooner from
        there than by computing it, and a promotion through it would be of worth."""
        if self.ssd is None or is_lossy(node) or Tier.SSD in node.kv.copies or self.config.policy != "evicpress":
            return False
        if not self.adapters.may_reach_ssd(node):
            return False
        num_tokens = len(node.key)
        load_s = self.costs.load_seconds(Tier.SSD, num_tokens * self.menu.slot_bytes)
        is_sooner: bool = load_s < self.costs.prefill.marginal_seconds(num_tokens, start_of(node))
        return is_sooner
