"""Choice between waiting for copies while memory is short and losing what would have to be lost at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_evicpress.core import Decision, LowerCopy, Tier
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.policy.planner import Planner

SEARCHED_FROM_S = 0.05
"""Seconds of requests that a plan has to lose for a better one to be sought: a search takes a few milliseconds, and
saves a tenth of the loss where it finds anything."""


def seconds_lost(decisions: Sequence[Decision], planner: Planner, costs: CostSnapshot, value_of_hit: float) -> float:
    """Loss of a plan, in seconds of a request that runs now: the utility by which EvicPress weighs
    (section 4.2), in units of a use that is certain. Of a policy that has none, what is dropped counts, computed once.
    """
    if planner.has_utility:
        return sum(decision.loss for decision in decisions) / value_of_hit
    candidates = planner.index.candidates
    dropped = [candidates[decision.node_id] for decision in decisions if decision.option.is_drop]
    return sum(costs.prefill.marginal_seconds(candidate.num_tokens, candidate.depth_tokens) for candidate in dropped)


class Congestion:
    """Number of requests that a second of computing delays: the one that needs it and those that could run meanwhile;
    or that a second of reading does: those whose reads are under way or wait for their turn.

    A mean over the last ``MEMORY_S`` seconds, at most ``MOST``; it has no clock of its own.
    """

    MEMORY_S = 10.0
    MOST = 8.0

    def __init__(self) -> None:
        self.value = 1.0
        self._now_s: float | None = None

    def observe(self, now_s: float, num_ready: int) -> None:
        """``num_ready`` requests have waited for nothing but their turn since the last call."""
        if self._now_s is not None and now_s > self._now_s:
            kept = math.exp((self._now_s - now_s) / self.MEMORY_S)
            self.value = kept * self.value + (1.0 - kept) * min(self.MOST, 1.0 + num_ready)
        self._now_s = now_s if self._now_s is None else max(now_s, self._now_s)


def copies_to_make(
    decisions: Sequence[Decision], lower_copies_of: Mapping[int, Sequence[LowerCopy]]
) -> tuple[int, int]:
    """Nodes of a plan that leave the GPU for a lower tier without a copy there yet, and their bytes."""
    sizes = [
        decision.option.num_bytes
        for decision in decisions
        if decision.source.tier == Tier.GPU
        and decision.option.tier not in (None, Tier.GPU)
        and not any(
            lower_copy.tier == decision.option.tier and lower_copy.form == decision.option.form
            for lower_copy in lower_copies_of.get(decision.node_id, ())
        )
    ]
    return len(sizes), sum(sizes)


def is_wasteful(decisions: Sequence[Decision], planner: Planner) -> bool:
    """True if more tokens are dropped only because they are in the way than slots of the GPU become free."""
    candidates = planner.index.candidates
    num_lost = sum(candidates[decision.node_id].num_tokens for decision in decisions if decision.is_forced)
    num_bytes = sum(decision.freed_bytes for decision in decisions if decision.source.tier == Tier.GPU)
    return num_lost * planner.policy.menu.slot_bytes > num_bytes
