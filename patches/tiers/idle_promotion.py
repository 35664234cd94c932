"""Bettering what the GPU holds while the server is idle, as far as there is free room. The policy chooses
(``Planner.plan_promotions``), the controller acts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import Decision, Tier
from sglang_evicpress.patches.tiers.promotion import FREE_SHARE
from sglang_evicpress.patches.tiers.types import Tiers
from sglang_evicpress.patches.tree.types import Allocator

PAUSE_S = 0.5
"""Between two looks at all nodes."""


class PromotionSteps(Protocol):
    """Promotions that were decided."""

    @property
    def is_busy(self) -> bool: ...
    def advance(self) -> None: ...


@dataclass(eq=False, repr=False)
class IdlePromotion:
    """Looks for what is worth promoting when nothing else is done. ``room``: free bytes below the GPU; ``held``: nodes
    that stay as they are; ``execute`` has decisions carried out."""

    storage: Tiers
    allocator: Allocator
    plan_promotions: Callable[[int, dict[Tier, int], Collection[int]], Sequence[Decision]]
    promotion: PromotionSteps
    room: Callable[[], dict[Tier, int]]
    held: Callable[[], Collection[int]]
    execute: Callable[[Sequence[Decision]], object]
    slot_bytes: int

    def __post_init__(self) -> None:
        self._next_look_s = 0.0

    @property
    def is_busy(self) -> bool:
        """True if something is being promoted."""
        return self.promotion.is_busy

    def advance(self) -> None:
        """Go on with what is being promoted; when that is done, look for more."""
        now = time.monotonic()
        if not self.promotion.is_busy and now >= self._next_look_s and self.storage.num_pending_jobs == 0:
            self._look()
            self._next_look_s = now + max(PAUSE_S, 20 * (time.monotonic() - now))
        self.promotion.advance()

    def _look(self) -> None:
        allocator = self.allocator
        free = (allocator.available_size() - int(FREE_SHARE * allocator.size)) * self.slot_bytes
        if free > 0:
            room = {**self.room(), Tier.GPU: free}
            self.execute(self.plan_promotions(free, room, self.held()))
