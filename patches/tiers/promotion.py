"""Bettering what the GPU holds while the server is idle: lossy nodes get their exact KV back from a copy below, nodes
that are below come up, as far as there is free room. The policy chooses (``Planner.plan_promotions``).

A hold keeps a node that was moved or compressed by hand out of that, until a request matches it or the time is over.
Pressure still moves a held node down, or drops it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.load_back import Load, Part
from sglang_evicpress.patches.tiers.prefetch import VERIFIED_S
from sglang_evicpress.patches.tree.node import is_lossy
from sglang_evicpress.policy.promotion import Budget

logger = logging.getLogger(__name__)

END_S = 5.0
"""What loads have to end when the tree goes."""

PAUSE_S = 0.5
"""Between two looks at all nodes."""

FREE_SHARE = 1 / 8
"""Of the pool: stays free, so that nothing that comes up is pushed down by the next request."""


class Promotion:
    """The part of EvicPressCache that promotes nodes. Everything here runs on the scheduler thread."""

    def open_promotion(self: Any) -> None:
        self.promoting: dict[int, Tier] = {}  # node ids, with the tier they are to be loaded from
        self.promotion_loads: list[PromotionLoad] = []
        self.set_apart: dict[Load, torch.Tensor] = {}  # slots of loads that did not end when the tree went
        self._holds: dict[int, float] = {}  # by node id, until when, time.monotonic
        self._next_look_s = 0.0

    def end_transfers(self: Any) -> None:
        """Before the tree goes: nothing writes any more into slots that will be others'."""
        deadline_s = time.monotonic() + END_S
        self.promoting.clear()
        for jobs in (self.loads, self.promotion_loads):
            for job in list(jobs):
                if job.await_end(deadline_s):
                    job.finish()
                else:
                    jobs.remove(job)
                    self.keep_apart(job)

    def keep_apart(self: Any, job: Load) -> None:
        """The tree goes, and a load has not ended in time: it may still write into its slots, so nobody gets these, nor
        the host memory that it reads, before it has."""
        if not self.set_apart:
            self.token_to_kv_pool_allocator.clear = self._clear_but_for_these
        self.set_apart[job] = torch.cat([part.slots for part in job.parts])
        self.storage.errors["load_deadline"] += 1
        logger.error("evicpress: a load has not ended within %g s: its slots are set apart until it does", END_S)

    def _clear_but_for_these(self: Any) -> None:
        """In place of the allocator's ``clear``, which makes every slot free: not those that are set apart, which count
        as protected."""
        allocator = self.token_to_kv_pool_allocator
        type(allocator).clear(allocator)
        taken = torch.unique(torch.cat(list(self.set_apart.values())) // allocator.page_size)
        for name in ("free_pages", "release_pages"):
            pages = getattr(allocator, name)
            setattr(allocator, name, pages[~torch.isin(pages, taken)])
        self.ledger.clear(sum(len(slots) for slots in self.set_apart.values()))

    def take_back(self: Any, job: Load) -> None:
        """A job has ended after the tree it was for was gone."""
        slots = self.set_apart.pop(job, None)
        if slots is None:
            return
        allocator = self.token_to_kv_pool_allocator
        self.ledger.release(len(slots))
        self.ledger.free(slots)
        for part in job.parts:
            self.host.unpin(part.copy.entry)
        if not self.set_apart:
            del allocator.clear

    def hold(self: Any, node_id: int, seconds: float) -> None:
        """Keep idle promotion from a node for so long; 0 ends a hold."""
        self._holds[node_id] = time.monotonic() + seconds

    def end_holds(self: Any, node_ids: Iterable[int]) -> None:
        """These nodes are used."""
        if self._holds:
            for node_id in node_ids:
                self._holds.pop(node_id, None)

    def hold_left_s(self: Any, node_id: int) -> float:
        """Seconds until idle promotion may promote a node; 0 without a hold."""
        return max(0.0, float(self._holds.get(node_id, 0.0)) - time.monotonic())

    def split_hold(self: Any, upper_id: int, lower_id: int) -> None:
        """The upper part of a node that was split is held as long as the lower."""
        if lower_id in self._holds:
            self._holds[upper_id] = self._holds[lower_id]

    def _held(self: Any) -> frozenset[int]:
        now = time.monotonic()
        self._holds = {each: until for each, until in self._holds.items() if until > now and each in self.nodes}
        return frozenset(self._holds)

    def promote(self: Any) -> None:
        """Go on with what is being promoted; when that is done, look for more."""
        now = time.monotonic()
        if not self.promoting and now >= self._next_look_s and self.storage.num_pending_jobs == 0:
            self.promoting = self._worth_promoting()
            took = time.monotonic() - now
            self._next_look_s = now + max(PAUSE_S, 20 * took)
        for node_id, tier in list(self.promoting.items()):
            if not self._promote_step(node_id, tier):
                del self.promoting[node_id]

    def _worth_promoting(self: Any) -> dict[int, Tier]:
        allocator = self.token_to_kv_pool_allocator
        free = (allocator.available_size() - int(FREE_SHARE * allocator.size)) * self.menu.slot_bytes
        if free <= 0:
            return {}
        source_tiers: dict[int, Tier] = {}
        room = {**self.host_room.room(), Tier.GPU: free}
        for decision in self.planner.plan_promotions(room, Budget(free, 1.0), self._held()):
            option, node = decision.option, self.nodes[decision.node_id]
            if option.tier != Tier.GPU:
                continue
            if node.value is None:
                source_tiers[node.id] = min(node.kv.copies)
            elif option.form is not None and option.form.is_exact:
                tier = self.exact_tier_of(node)
                if tier is not None:
                    source_tiers[node.id] = tier
        return source_tiers

    def _promote_step(self: Any, node_id: int, tier: Tier) -> bool:
        """The next step of promoting a node; False when it is done, or cannot be any more."""
        node = self.nodes.get(node_id)
        if node is None or node.lock_ref > 0 or (node.value is not None and not is_lossy(node)):
            return False
        if self.hold_left_s(node_id) > 0.0:
            return False
        if node.kv.job is not None:
            return True
        copy = node.kv.copies.get(Tier.HOST)
        if copy is None or (node.value is not None and not copy.is_exact):
            below = node.kv.copies.get(Tier.SSD)
            if tier != Tier.SSD or below is None or below.entry.tried:
                return False
            if node.value is not None and not below.is_exact:
                return False  # it was promoted as it is
            num_bytes = below.entry.header.payload_bytes
            if self.ssd_io.reads or time.monotonic() - self.busy_s < self.costs.load_seconds(Tier.SSD, num_bytes):
                return True  # a request that comes now would have to wait for it: none came for as long as it takes
            read = self.ssd_io.start_read(below.entry)
            below.entry.tried = read is None
            return read is not None
        if copy.entry.checked_s < time.perf_counter() - VERIFIED_S:
            self.start_check(copy.entry)
            return True
        self._start_promotion(node, copy)
        return node.kv.job is not None

    def _start_promotion(self: Any, node: Any, copy: Any) -> None:
        allocator = self.token_to_kv_pool_allocator
        parent = node.parent
        is_reachable = parent is self.root_node or parent.value is not None
        if not is_reachable or allocator.available_size() - copy.num_slots < FREE_SHARE * allocator.size / 2:
            return
        slots = allocator.alloc(copy.num_slots)
        if slots is None:
            return
        self.ledger.reserve(len(slots))
        node.kv.job = PromotionLoad(self, node, copy, slots)
        self.promotion_loads.append(node.kv.job)
        node.kv.job.start()


class PromotionLoad(Load):
    """A load into slots that nobody sees before it is over."""

    def __init__(self, cache: Any, node: Any, copy: Any, slots: Any) -> None:
        super().__init__(cache, [Part(copy, slots)])
        self.node_id, self.version = node.id, node.kv.version

    def start(self) -> None:
        if not self.is_started:
            self.cache.host.pin(self.parts[0].copy.entry)
        super().start()

    def finish(self) -> None:
        cache, part = self.cache, self.parts[0]
        if self not in cache.promotion_loads:
            cache.take_back(self)  # the cache was flushed
            return
        cache.promotion_loads.remove(self)
        slots, copy = part.slots, part.copy
        cache.ledger.release(len(slots))
        node = cache.nodes.get(self.node_id)
        if node is not None and node.kv.job is self:
            node.kv.job = None
        cache.host.unpin(copy.entry)
        if self.error is not None or node is None or not self._fits(node):
            cache.ledger.free(slots)
        elif node.value is None:
            cache.place(node, copy, slots)
            cache.storage.counts["promoted"] += 1
        else:
            cache._replace(node, slots, is_lossy_prefix=False)
            cache.storage.counts["upgraded"] += 1

    def _fits(self, node: Any) -> bool:
        """True if the node is still what it was when the load began."""
        is_same = node.kv.version == self.version and node.kv.copies.get(Tier.HOST) is self.parts[0].copy
        is_reachable = node.parent is self.cache.root_node or node.parent.value is not None
        return is_same and is_reachable and node.lock_ref == 0 and not self.cache.hold_left_s(node.id)
