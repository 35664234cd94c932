"""Making room on the GPU while a request waits for it: nothing here waits.

What has no copy below and is worth one is copied where the plan is carried out, and then freed: on a device in the
stream that will overwrite its slots, so that its order protects them; on the CPU that is a copy in memory.

SGLang 0.5.15.post1 asks ``evict`` for all the slots that it is about to take, free ones included, later releases for
what is short of them. ``evict`` frees what it is asked for; a hook of ``evict_from_tree_cache`` asks for the shortfall.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

from sglang_evicpress.controller.controller import BY_UTILITY, NO_COPY
from sglang_evicpress.core import Tier
from sglang_evicpress.policy.wait_cost import bytes_to_copy, is_wasteful, seconds_lost

MOST_ROUNDS = 4

NUM_LOGGED = 64
"""Evictions that ``/evicpress/stats`` shows, the last ones."""


class Eviction:
    """The part of EvicPressCache that frees slots. Everything here runs on the scheduler thread."""

    def open_eviction(self: Any) -> None:
        self.last_evictions: deque[dict[str, object]] = deque(maxlen=NUM_LOGGED)

    def evict(self: Any, params: EvictParams) -> EvictResult:
        """Free ``params.num_tokens`` slots by the policy's plan, however many are free: all that unlocked nodes hold
        if those are fewer, and at least 1/128 of the pool.

        Without that headroom every decode step on a full pool would make a plan to free a single slot.
        """
        needed = params.num_tokens
        if self.disable or needed <= 0:
            return EvictResult()
        begin = time.perf_counter()
        freed = self.free_slots(max(needed, self.token_to_kv_pool_allocator.size // 128), needed)
        freed += self._free_until(needed - freed)
        if freed < needed:  # what waiting requests hold keeps the nodes above it as well
            for _ in self.release_from_tail():
                freed += self._free_until(needed - freed)
                if freed >= needed:
                    break
        if freed < needed:
            freed += self.shadows.release_shadows()
        if freed < needed and self.is_alone and self.aside.return_all():
            freed += self._free_until(needed - freed)
        self.update_eviction_metrics(freed, begin)
        self.eviction_seconds["all"] += time.perf_counter() - begin
        return EvictResult(num_tokens_evicted=freed)

    def _free_until(self: Any, needed: int) -> int:
        """Plan until so many slots are free or nothing comes of it: a move may have cost another the copy as which it
        was to leave, and those that failed are set aside for the next plan."""
        freed = 0
        while freed < needed:
            num_failed = self.num_failed_moves
            more = self.free_slots(needed - freed)
            if more <= 0 and self.num_failed_moves == num_failed:
                break
            freed += more
        return freed

    def make_room(self: Any, num_tokens: int) -> None:
        """Evict what is short of ``num_tokens`` free slots; nothing where so many are free."""
        shortfall = num_tokens - self.token_to_kv_pool_allocator.available_size()
        if shortfall > 0:
            self.evict(EvictParams(num_tokens=shortfall))

    def has_room(self: Any, num_tokens: int) -> bool:
        """True if so many slots are free, or can be without a drop for want of room below."""
        shortfall = num_tokens - self.token_to_kv_pool_allocator.available_size()
        return shortfall <= 0 or self.free_slots(shortfall, may_force=False) >= shortfall

    def free_slots(self: Any, wanted: int, needed: int | None = None, *, may_force: bool = True) -> int:
        """Free ``wanted`` slots by the policy's plan, if unlocked nodes hold that many; returns those really freed.

        Once ``needed``, all if None, are free, nothing is lost for the others: they are freed when they can be. Where
        room below is short nodes are dropped that could have gone there, unless not ``may_force``.
        """
        wanted = min(wanted, self.ledger.evictable)
        if wanted <= 0:
            return 0
        if self.host is None:
            return int(self.controller.free_bytes(Tier.GPU, wanted * self.menu.slot_bytes))
        freed, needed = 0, wanted if needed is None else min(needed, wanted)
        for _ in range(MOST_ROUNDS):  # so many bytes are not on their way at once
            more = self._free_once(wanted - freed, needed - freed, may_force=may_force)
            freed += more
            if more <= 0 or freed >= needed:
                break
        if freed < needed:
            plan = self.planner.plan(
                Tier.GPU, (needed - freed) * self.menu.slot_bytes, lower_copies_of=self.placement.lower_copies_of
            )
            if may_force or not any(decision.option.is_drop for decision in plan):
                freed += self.controller.execute(plan, NO_COPY)
        self.mark_dirty()
        return freed

    def _free_once(self: Any, wanted: int, needed: int, *, may_force: bool) -> int:
        """Carry out the better of two plans: one that copies first what is not below yet, and one that does not. The
        time that copying takes counts once, as what the other loses does: whoever waits for the one would wait for the
        other. A plan that drops whole branches for the few slots above them is the last choice, and none at all unless
        ``may_force``."""
        slot_bytes = self.menu.slot_bytes
        patient = self.planner.plan(Tier.GPU, wanted * slot_bytes, self.host_room.room())
        num_bytes, wastes = bytes_to_copy(patient, self.placement.lower_copies_of), is_wasteful(patient, self.planner)
        if not num_bytes and not wastes:
            return int(self.controller.execute(patient, at_once=True))
        urgent = self.planner.plan(Tier.GPU, needed * slot_bytes, lower_copies_of=self.placement.lower_copies_of)
        terms = self.planner, self.costs, self.value_of_hit()
        copy_s = self.costs.load_seconds(Tier.HOST, num_bytes)
        lost_s = {name: seconds_lost(plan, *terms) for name, plan in (("patient", patient), ("urgent", urgent))}
        is_enough = sum(decision.freed_bytes for decision in urgent) >= needed * slot_bytes
        is_urgent = is_enough and lost_s["urgent"] <= lost_s["patient"] + copy_s
        if is_wasteful(urgent, self.planner):
            if wastes and not may_force:
                return 0
            is_urgent = is_urgent and wastes
        elif wastes:
            is_urgent = True
        begin = time.perf_counter()
        if is_urgent:
            way, freed = "without_copies", self.controller.execute(urgent, BY_UTILITY)
        else:
            way, freed = "with_copies", self.controller.execute(patient, at_once=True)
        took_s = time.perf_counter() - begin
        self.evictions[way] += 1
        self.eviction_seconds[way] += took_s
        self.last_evictions.append(
            {
                "way": way,
                "time_s": self.now_s,
                "needed_slots": needed,
                "freed_slots": int(freed),
                "bytes_to_copy": num_bytes,
                "copy_s": copy_s,
                "lost_s": lost_s["patient"],
                "lost_without_copies_s": lost_s["urgent"],
                "is_enough_without_copies": is_enough,
                "running_requests": self._num_running,
                "took_s": took_s,
            }
        )
        return int(freed)

    @property
    def _num_running(self: Any) -> int:
        batch = getattr(self.scheduler, "running_batch", None)
        return 0 if batch is None else len(batch.reqs)

    def describe_evictions(self: Any) -> dict[str, object]:
        return {
            "counts": dict(self.evictions),
            "seconds": dict(self.eviction_seconds),
            "last": list(self.last_evictions),
        }


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
