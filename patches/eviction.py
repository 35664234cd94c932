"""Making room on the GPU while a request waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.policy.patience import bytes_to_copy, seconds_lost

PATIENCE = 2.0
"""How many times its predicted duration copying may take ..."""

LEAST_S = 0.02
"""... and so many seconds more, for what is copied already."""

MOST_ROUNDS = 4


class Eviction:
    """The part of EvicPressCache that frees slots. Everything here runs on the scheduler thread."""

    def evict(self: Any, params: EvictParams) -> EvictResult:
        """Free what is short of ``params.num_tokens`` slots by the policy's plan; at least 1/128 of the pool.

        Without that headroom every decode step on a full pool would make a plan to free a single slot.
        """
        if self.disable:
            return EvictResult()
        begin = time.perf_counter()
        allocator = self.token_to_kv_pool_allocator
        shortfall = params.num_tokens - allocator.available_size()
        wanted = max(shortfall, allocator.size // 128) if shortfall > 0 else 0
        freed = self.relieve(wanted) if wanted else 0
        while freed < shortfall and (more := self.relieve(shortfall - freed)):
            freed += more  # a move of the first plan had cost another the copy as which it was to leave
        if freed < shortfall:
            freed += self.release_shadows()
        self.update_eviction_metrics(freed, begin)
        return EvictResult(num_tokens_evicted=freed)

    def relieve(self: Any, wanted: int) -> int:
        """Free ``wanted`` slots by the policy's plan, if unlocked nodes hold that many; returns those really freed.

        What would have to be copied first is only waited for where that loses less than what can be done at once.
        """
        wanted = min(wanted, self.evictable_size_)
        if wanted <= 0:
            return 0
        if self.host is None:
            return int(self.controller.relieve(Tier.GPU, wanted * self.menu.slot_bytes))
        freed = 0
        for _ in range(MOST_ROUNDS):  # so many bytes are not on their way at once
            urgent = self.policy.plan(Tier.GPU, (wanted - freed) * self.menu.slot_bytes, ready=self.ready)
            copied = self._relieve_by_copies(wanted - freed, urgent)
            if copied is None:
                return freed + int(self.controller.carry_out(urgent))
            freed += copied
            if copied <= 0 or freed >= wanted:
                break
        if freed < wanted:
            freed += self.controller.relieve(Tier.GPU, (wanted - freed) * self.menu.slot_bytes, ready=self.ready)
        return freed

    def _relieve_by_copies(self: Any, wanted: int, urgent: Sequence[Decision]) -> int | None:
        """Carry out the plan that may copy, and wait for its copies, if it is better than the ``urgent`` one; returns
        the slots freed, None if it is not."""
        patient = self.policy.plan(Tier.GPU, wanted * self.menu.slot_bytes, self.room())
        num_bytes = bytes_to_copy(patient, self.ready)
        if not num_bytes:
            return None
        copy_s = self.costs.load_seconds(Tier.HOST, num_bytes)
        terms = self.policy, self.costs, self.value_of_hit()
        gain_s = seconds_lost(urgent, *terms) - seconds_lost(patient, *terms) - copy_s
        if gain_s <= 0.0:
            return None
        allocator, copying = self.token_to_kv_pool_allocator, self.workers["copy"]
        before = allocator.available_size()
        self.controller.carry_out(patient)
        begin = time.perf_counter()
        due = begin + min(gain_s, LEAST_S + PATIENCE * copy_s)
        while allocator.available_size() - before < wanted and copying.num_pending:
            self.arrival.clear()
            jobs = copying.finished()
            for job in jobs:
                job.finish()
            left_s = due - time.perf_counter()
            if left_s <= 0.0:
                break
            if not jobs:
                self.arrival.wait(left_s)
        self.stir()
        self.tier_counts["waits_for_copies"] += 1
        return int(allocator.available_size() - before)
