"""Making room on the GPU while a request waits for it.

SGLang 0.5.15.post1 asks ``evict`` for all the slots that it is about to take, free ones included, later releases for
what is short of them. ``evict`` frees what it is asked for; a hook of ``evict_from_tree_cache`` asks for the shortfall.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.patches.back_up import BackUp
from sglang_evicpress.policy.patience import bytes_to_copy, seconds_lost

PATIENCE = 2.0
"""How many times its predicted duration copying may take ..."""

LEAST_S = 0.01
"""... and so many seconds more, for threads to wake up."""

MOST_ROUNDS = 4


class Eviction:
    """The part of EvicPressCache that frees slots. Everything here runs on the scheduler thread."""

    def evict(self: Any, params: EvictParams) -> EvictResult:
        """Free ``params.num_tokens`` slots by the policy's plan, however many are free: all that unlocked nodes hold
        if those are fewer, and at least 1/128 of the pool.

        Without that headroom every decode step on a full pool would make a plan to free a single slot.
        """
        needed = params.num_tokens
        if self.disable or needed <= 0:
            return EvictResult()
        begin = time.perf_counter()
        freed = self.relieve(max(needed, self.token_to_kv_pool_allocator.size // 128), needed)
        freed += self._relieve_until(needed - freed)
        if freed < needed and self.staged_bytes:  # what waiting requests hold keeps the nodes above it as well
            self.let_go_all()
            freed += self.relieve(needed - freed)
        if freed < needed:
            freed += self.release_shadows()
        if freed < needed and self.is_alone and self.return_all_aside():
            freed += self._relieve_until(needed - freed)
        self.update_eviction_metrics(freed, begin)
        return EvictResult(num_tokens_evicted=freed)

    def _relieve_until(self: Any, needed: int) -> int:
        """Plan until so many slots are free or nothing comes of it: a move may have cost another the copy as which it
        was to leave, and those that failed are set aside for the next plan."""
        freed = 0
        while freed < needed:
            num_failed = self.num_failed_moves
            more = self.relieve(needed - freed)
            if more <= 0 and self.num_failed_moves == num_failed:
                break
            freed += more
        return freed

    def make_room(self: Any, num_tokens: int) -> None:
        """Evict what is short of ``num_tokens`` free slots; nothing where so many are free."""
        shortfall = num_tokens - self.token_to_kv_pool_allocator.available_size()
        if shortfall > 0:
            self.evict(EvictParams(num_tokens=shortfall))

    def relieve(self: Any, wanted: int, needed: int | None = None) -> int:
        """Free ``wanted`` slots by the policy's plan, if unlocked nodes hold that many; returns those really freed.

        What would have to be copied first is only waited for where that loses less than what can be done at once, and
        only until ``needed`` slots, all if None, are free; the others are soon after.
        """
        wanted = min(wanted, self.evictable_size_)
        if wanted <= 0:
            return 0
        if self.host is None:
            return int(self.controller.relieve(Tier.GPU, wanted * self.menu.slot_bytes))
        freed, needed = 0, wanted if needed is None else min(needed, wanted)
        for _ in range(MOST_ROUNDS):  # so many bytes are not on their way at once
            urgent = self.policy.plan(Tier.GPU, (wanted - freed) * self.menu.slot_bytes, ready=self.ready)
            copied = self._relieve_by_copies(wanted - freed, needed - freed, urgent)
            if copied is None:
                return freed + int(self.controller.carry_out(urgent))
            freed += copied
            if copied <= 0 or freed >= needed:
                break
        if freed < needed:
            freed += self.controller.relieve(Tier.GPU, (needed - freed) * self.menu.slot_bytes, ready=self.ready)
        return freed

    def _relieve_by_copies(self: Any, wanted: int, needed: int, urgent: Sequence[Decision]) -> int | None:
        """Carry out the plan that may copy, and wait until its copies have freed ``needed``, if it is better than the
        ``urgent`` one; returns the slots freed, None if it is not."""
        patient = self.policy.plan(Tier.GPU, wanted * self.menu.slot_bytes, self.room())
        num_bytes = bytes_to_copy(patient, self.ready)
        if not num_bytes:
            return None
        # What is being copied already comes first, and whoever runs waits too.
        copy_s = self.costs.load_seconds(Tier.HOST, num_bytes + self._copying_bytes)
        terms = self.policy, self.costs, self.value_of_hit()
        gain_s = -seconds_lost(patient, *terms) - copy_s * self._num_waiting_for_room
        if sum(decision.freed_bytes for decision in urgent) >= needed * self.menu.slot_bytes:
            gain_s += seconds_lost(urgent, *terms)
            if gain_s <= 0.0:
                return None
        else:
            gain_s = math.inf  # it is not enough
        allocator = self.token_to_kv_pool_allocator
        before = allocator.available_size()
        self.controller.carry_out(patient)
        leaving = [decision.node_id for decision in patient]
        due = time.perf_counter() + min(gain_s, LEAST_S + PATIENCE * copy_s)
        while allocator.available_size() - before < needed and any(map(self._is_leaving, leaving)):
            self.arrival.clear()
            if self._finish_copies():
                continue
            left_s = due - time.perf_counter()
            if left_s <= 0.0:
                break
            self.arrival.wait(left_s)
        self.stir()
        self.tier_counts["waits_for_copies"] += 1
        return int(allocator.available_size() - before)

    @property
    def _num_waiting_for_room(self: Any) -> int:
        """Requests that a wait holds up: whoever runs, and the one that room is made for."""
        batch = getattr(self.scheduler, "running_batch", None)
        return 1 + (0 if batch is None else len(batch.reqs))

    def _is_leaving(self: Any, node_id: int) -> bool:
        node = self.nodes.get(node_id)
        return node is not None and node.value is not None and bool(node.kv.is_leaving)

    def _finish_copies(self: Any) -> bool:
        """Take in the copies that were made; whether there were any. Other jobs wait for the next tick: what follows
        from them may concern nodes that a request is about to load."""
        jobs = self.workers["copy"].finished()
        for job in jobs:
            if isinstance(job, BackUp):
                job.finish()
            else:
                self.postponed.append(job)
        return bool(jobs)


def _around_evict_from_tree_cache(original: Callable[..., Any], tree_cache: Any, num_tokens: int) -> None:
    """AROUND ``evict_from_tree_cache``: our cache is asked for the shortfall alone."""
    if isinstance(tree_cache, Eviction):
        tree_cache.make_room(num_tokens)
    else:
        original(tree_cache, num_tokens)


def install(registry: Any, hook_type: Any) -> None:
    """Register the hook of ``evict_from_tree_cache``."""
    target = "sglang.srt.mem_cache.common.evict_from_tree_cache"
    registry.register(target, _around_evict_from_tree_cache, hook_type.AROUND)
