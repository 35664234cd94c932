"""Bettering what the GPU holds while the server is idle, as far as there is free room. The policy chooses
(``Planner.plan_promotions``), the controller acts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.patches.tiers.promotion import FREE_SHARE
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.types import Allocator

PAUSE_S = 0.5
"""Between two looks at all nodes."""


class PromotionPlans(Protocol):
    """The policy in use."""

    def look_for_promotions(self, held: Collection[int]) -> bool: ...
    def plan_promotions(self, num_bytes: int, room: dict[Tier, int], held: Collection[int]) -> Sequence[Decision]: ...


class PromotionSteps(Protocol):
    """Promotions that were decided."""

    @property
    def is_busy(self) -> bool: ...
    def advance(self) -> None: ...


@dataclass(eq=False, repr=False)
class IdlePromotion:
    """Looks for what is worth promoting when nothing else is done, at some nodes a round. ``room``: free bytes below
    the GPU; ``held``: nodes that stay as they are; ``execute`` has decisions carried out."""

    storage: Tiers
    allocator: Allocator
    plans: PromotionPlans
    promotion: PromotionSteps
    room: Callable[[], dict[Tier, int]]
    held: Callable[[], Collection[int]]
    execute: Callable[[Sequence[Decision]], object]
    slot_bytes: int

    def __post_init__(self) -> None:
        self._next_look_s = 0.0
        self._is_looking = False

    @property
    def is_busy(self) -> bool:
        """True if something is being promoted, or looked for."""
        return self.promotion.is_busy or self._is_looking

    def advance(self) -> None:
        """Go on with what is being promoted; when that is done, look for more."""
        now = self.storage.now_s()
        if not self.promotion.is_busy and now >= self._next_look_s and self.storage.num_pending_jobs == 0:
            self._is_looking = not self._look()
            if not self._is_looking:
                self._next_look_s = now + PAUSE_S
        self.promotion.advance()

    def _look(self) -> bool:
        """False if there are nodes left to be looked at."""
        allocator, held = self.allocator, self.held()
        free = (allocator.available_size() - int(FREE_SHARE * allocator.size)) * self.slot_bytes
        if free > 0:
            if not self.plans.look_for_promotions(held):
                return False
            self.execute(self.plans.plan_promotions(free, {**self.room(), Tier.GPU: free}, held))
        return True
