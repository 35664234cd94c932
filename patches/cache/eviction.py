"""Making room on the GPU while a request waits for it: nothing here waits.

What has no copy below and is worth one is copied where the plan is carried out, and then freed: on a device in the
stream that will overwrite its slots, so that its order protects them; on the CPU that is a copy in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from sglang_evicpress.controller.controller import NO_COPY
from sglang_evicpress.core import Decision, LowerCopy, Tier
from sglang_evicpress.patches.tiers.types import Controlling, Evictions, Slots
from sglang_evicpress.patches.tree.types import Allocator
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.wait_cost import copies_to_make, is_wasteful, seconds_lost

MOST_ROUNDS = 4

EXPLORED = 16
"""Of plans that copying is too dear for, each so many copies all the same: else a cost learned too high would stay."""


@dataclass(eq=False, repr=False)
class Eviction:
    """Frees slots by the policy's plans. ``lower_copies_of``: by node id, what lower tiers have of it;
    ``bounded``: of so many bytes of a tier those of a few nodes.

    Where plans do not free enough, ``release_from_tail`` gives up what waiting requests keep, a step for each of them,
    ``release_shadows`` what profiling keeps, and ``return_aside`` lets plans be about nodes again whose moves failed.
    """

    allocator: Allocator
    ledger: Slots
    controller: Controlling
    room: Callable[[], Mapping[Tier, int]]
    lower_copies_of: Mapping[int, Sequence[LowerCopy]]
    log: Evictions
    _: KW_ONLY
    costs: Callable[[], CostSnapshot]
    observe_copies: Callable[[int, int, float], None]
    bounded: Callable[[Tier, int], int]
    mark_dirty: Callable[[], None]
    num_running: Callable[[], int]
    release_from_tail: Callable[[], Iterable[None]]
    release_shadows: Callable[[], int]
    return_aside: Callable[[], bool]
    slot_bytes: int
    has_tiers: bool

    def __post_init__(self) -> None:
        self._num_too_dear = 0

    def evict(self, needed: int) -> int:
        """Free ``needed`` slots, however many are free: all that unlocked nodes hold if those are fewer, and at least
        1/128 of the pool, or what some nodes hold if that is less. Returns how many were freed.

        Without that headroom every decode step on a full pool would make a plan to free a single slot.
        """
        begin = time.perf_counter()
        headroom = self.bounded(Tier.GPU, self.allocator.size // 128 * self.slot_bytes) // self.slot_bytes
        freed = self.free_slots(max(needed, headroom), needed)
        freed += self._free_until(needed - freed)
        if freed < needed:  # what waiting requests hold keeps the nodes above it as well
            for _ in self.release_from_tail():
                freed += self._free_until(needed - freed)
                if freed >= needed:
                    break
        if freed < needed:
            freed += self.release_shadows()
        if freed < needed and self.return_aside():
            freed += self._free_until(needed - freed)
        self.log.seconds["all"] += time.perf_counter() - begin
        return freed

    def _free_until(self, needed: int) -> int:
        """Plan until so many slots are free or nothing comes of it: a move may have cost another the copy as which it
        was to leave, and those that failed are set aside for the next plan."""
        freed = 0
        while freed < needed:
            num_failed = self.controller.num_failed.total()
            more = self.free_slots(needed - freed)
            if more <= 0 and self.controller.num_failed.total() == num_failed:
                break
            freed += more
        return freed

    def make_room(self, num_tokens: int) -> None:
        """Evict what is short of ``num_tokens`` free slots; nothing where so many are free."""
        shortfall = num_tokens - self.allocator.available_size()
        if shortfall > 0:
            self.evict(shortfall)

    def make_whole_room(self, num_tokens: int) -> None:
        """The same, but nothing is lost where that would not be enough: not for what can also be done later."""
        if num_tokens - self.allocator.available_size() > self.ledger.evictable:
            self.release_shadows()
        shortfall = num_tokens - self.allocator.available_size()
        if 0 < shortfall <= self.ledger.evictable:
            self.evict(shortfall)

    def has_room(self, num_tokens: int) -> bool:
        """True if so many slots are free, or can be without a drop for want of room below."""
        shortfall = num_tokens - self.allocator.available_size()
        return shortfall <= 0 or self.free_slots(shortfall, may_force=False) >= shortfall

    def free_slots(self, wanted: int, needed: int | None = None, *, may_force: bool = True) -> int:
        """Free ``wanted`` slots by the policy's plan, if unlocked nodes hold that many; returns those really freed.

        Once ``needed``, all if None, are free, nothing is lost for the others: they are freed when they can be. Where
        room below is short nodes are dropped that could have gone there, unless not ``may_force``.
        """
        wanted = min(wanted, self.ledger.evictable)
        if wanted <= 0:
            return 0
        if not self.has_tiers:
            return self.controller.free_bytes(Tier.GPU, wanted * self.slot_bytes)
        freed, needed = 0, wanted if needed is None else min(needed, wanted)
        for _ in range(MOST_ROUNDS):  # so many bytes are not on their way at once
            more = self._free_once(wanted - freed, needed - freed, may_force=may_force)
            freed += more
            if more <= 0 or freed >= needed:
                break
        if freed < needed:
            plan = self.controller.planner.plan(
                Tier.GPU, (needed - freed) * self.slot_bytes, lower_copies_of=self.lower_copies_of
            )
            if may_force or not any(decision.option.is_drop for decision in plan):
                freed += self.controller.execute(plan, NO_COPY)
        self.mark_dirty()
        return freed

    def _free_once(self, wanted: int, needed: int, *, may_force: bool) -> int:
        """Carry out the better of two plans: one that copies first what is not below yet, and one that does not. The
        time that copying takes counts once, as what the other loses does: whoever waits for the one would wait for the
        other. A plan that drops whole branches for the few slots above them is the last choice, and none at all unless
        ``may_force``."""
        controller, planner, costs = self.controller, self.controller.planner, self.costs()
        slot_bytes, lower_copies_of = self.slot_bytes, self.lower_copies_of
        patient = planner.plan(Tier.GPU, wanted * slot_bytes, self.room())
        (num_copies, num_bytes), wastes = copies_to_make(patient, lower_copies_of), is_wasteful(patient, planner)
        if not num_copies and not wastes:
            return controller.execute(patient, at_once=True)
        urgent = planner.plan(Tier.GPU, needed * slot_bytes, lower_copies_of=lower_copies_of)
        # On a device a copy is only queued, and the next pass waits behind it for as long as a load takes.
        copy_s = max(costs.copy_seconds(num_copies, num_bytes), costs.load_seconds(Tier.HOST, num_bytes))
        lost_s, lost_without_copies_s = (
            seconds_lost(plan, planner, costs, controller.value_of_hit) for plan in (patient, urgent)
        )
        is_enough = sum(decision.freed_bytes for decision in urgent) >= needed * slot_bytes
        is_urgent = is_enough and lost_without_copies_s <= lost_s + copy_s
        if is_wasteful(urgent, planner):
            if wastes and not may_force:
                return 0
            is_urgent = is_urgent and wastes
        elif wastes:
            is_urgent = True
        if is_urgent and num_copies and not wastes and lost_s < lost_without_copies_s:
            self._num_too_dear += 1
            is_urgent = self._num_too_dear % EXPLORED > 0
        begin = time.perf_counter()
        freed = controller.execute(urgent) if is_urgent else self._copy(patient)
        self.log.add(
            "without_copies" if is_urgent else "with_copies",
            time.perf_counter() - begin,
            time_s=controller.now_s,
            needed_slots=needed,
            freed_slots=freed,
            nodes_to_copy=num_copies,
            bytes_to_copy=num_bytes,
            copy_s=copy_s,
            lost_s=lost_s,
            lost_without_copies_s=lost_without_copies_s,
            is_enough_without_copies=is_enough,
            running_requests=self.num_running(),
        )
        return freed

    def _copy(self, plan: Sequence[Decision]) -> int:
        """Carry out a plan whose copies are made at once, and learn what these take."""
        counts, seconds = self.log.counts, self.log.seconds
        copies, num_bytes, copying_s = counts["copies"], counts["copied_bytes"], seconds["copying"]
        freed = self.controller.execute(plan, at_once=True)
        if counts["copies"] > copies:
            num_copied, took_s = counts["copies"] - copies, seconds["copying"] - copying_s
            self.observe_copies(num_copied, counts["copied_bytes"] - num_bytes, took_s)
        return freed
