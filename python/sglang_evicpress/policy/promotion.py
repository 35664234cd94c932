"""Bettering what is there: promotions, exact forms and gains in place when there is room or the exchange pays."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_evicpress.core import EXACT, Decision, Form, Option, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Entry
from sglang_evicpress.policy.index import NodeIndex
from sglang_evicpress.policy.plan import Plan
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.utility import utility

MAX_OPTIONS = 64

CLEARLY = 1.0 + 1e-9
"""What comes must gain this much more than what is next to go loses, so that rounding does not decide."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one promotion: bytes, and seconds of loading as the costs predict them; and how many of the
    best changes it looks at closely, each of which may need a plan that makes room for it."""

    num_bytes: int
    seconds: float
    num_options: int = MAX_OPTIONS


class PromotionOption(NamedTuple):
    """A change of one node that raises its utility by ``gain`` (weighted), needs ``added_bytes`` on the tier of
    ``tier`` and moves ``moved_bytes``. ``order`` sorts by gain per byte moved."""

    order: float
    node_id: int
    tier: int
    form: Form
    num_bytes: int
    quality: float
    delay_s: float
    gain: float
    added_bytes: int
    moved_bytes: int


class PromotionSearch:
    """Search for changes that together raise the total utility, some nodes at a time (EvicPress section 4.1: KV caches
    are re-arranged between tiers after re-profiling).

    A node may be brought to the GPU; to the exact form where a lower tier has an exact copy of it (an exact form); or
    to a form or tier that is worth more in fewer bytes, which happens when its curve or a cost has changed.

    Nothing comes to a tier, not even to free room, unless it gains more per byte than another node there would lose by
    its next step: it would be the next to leave. So what a plan has taken stays away until weights, curves or costs
    have changed.
    """

    def __init__(self, index: NodeIndex, policy: EvicPressPolicy, num_options: int = MAX_OPTIONS) -> None:
        self._index, self._policy, self._num_options = index, policy, num_options
        self._left = list(reversed(index.candidates))
        self._best: list[PromotionOption] = []

    def look(self, max_nodes: int, held: Collection[int] = ()) -> bool:
        """Look at so many nodes more, but for those ``held`` (ids); False when there is none left. What has changed
        since a node was looked at is seen by the next search."""
        looked = [self._left.pop() for _ in range(min(max_nodes, len(self._left)))]
        self._best = heapq.nsmallest(self._num_options, (*self._best, *self._staying(looked, held)))
        return bool(self._left)

    def _staying(self, node_ids: Iterable[int], held: Collection[int]) -> list[PromotionOption]:
        least = [_least_per_byte(self._index, tier) for tier in Tier]

        def stays(option: PromotionOption) -> bool:
            per_byte = next((key for node_id, key in least[option.tier] if node_id != option.node_id), 0.0)
            return option.gain > per_byte * CLEARLY * option.added_bytes

        return list(filter(stays, _options(self._index, self._policy, node_ids, held)))

    def plan(self, room: Mapping[Tier, int], budget: Budget, held: Collection[int] = ()) -> list[Decision]:
        """Decisions, in order of execution, about the best nodes found; empty when nothing is gained. Those ``held``
        are not bettered; they may make room for others.

        By gain per byte moved, within ``budget``. Where ``room`` does not suffice others make room if they lose less
        than is gained, at most once per tier and call: to search again goes on from there. ``room`` should leave out
        what is kept free for new nodes. The bytes of a node that is brought up count as free where it was, an exact
        form takes the difference: room for both at a time is the caller's to find.
        """
        node_ids = dict.fromkeys(option.node_id for option in self._best)
        options = heapq.nsmallest(budget.num_options, self._staying(node_ids, held))
        return _decide(self._index, self._policy, options, room, budget)


def _decide(
    index: NodeIndex,
    policy: EvicPressPolicy,
    options: Iterable[PromotionOption],
    room: Mapping[Tier, int],
    budget: Budget,
) -> list[Decision]:
    free = [room.get(tier, 0) for tier in Tier]
    left_bytes, left_s = budget.num_bytes, budget.seconds
    decided: list[Decision] = []
    touched: set[int] = set()  # nodes decided on, and their parents: what is decided together must not meet in the tree

    def kin(node_id: int) -> set[int]:
        parent_id = index.candidates[node_id].parent_id
        return {node_id} if parent_id is None else {node_id, parent_id}

    for option in options:
        node_id, candidate = option.node_id, index.candidates[option.node_id]
        seconds = _seconds(policy, candidate, option)
        if option.moved_bytes > left_bytes or seconds > left_s or kin(node_id) & touched:
            continue
        relief: list[Decision] = []
        missing = option.added_bytes - free[option.tier]
        if option.added_bytes > 0 and missing > 0:
            relief = _relief(index, Tier(option.tier), missing, free)
            changed = {decision.node_id for decision in relief}
            if not relief or kin(node_id) & changed or touched & {one for other in changed for one in kin(other)}:
                continue
            if sum(decision.loss for decision in relief) >= option.gain:
                continue
        for decision in (*relief, _decision(policy, candidate, option)):
            if decision.source.tier is not None:
                free[decision.source.tier] += decision.source.num_bytes
            if decision.option.tier is not None:
                free[decision.option.tier] -= decision.option.num_bytes
            touched |= kin(decision.node_id)
            decided.append(decision)
        left_bytes -= option.moved_bytes
        left_s -= seconds
    return decided


def _least_per_byte(index: NodeIndex, tier: Tier) -> list[tuple[int, float]]:
    """The two nodes of a tier whose steps come first, and what they lose per byte freed; without nodes of no bytes."""
    least: list[tuple[int, float]] = []
    taken: list[Entry] = []
    while len(least) < 2 and (first := index.first(int(tier))) is not None and not math.isinf(first[1].key):
        least.append((first[0].id, max(0.0, first[1].key)))
        taken.append(heapq.heappop(index.heaps[tier]))
    for entry in taken:
        heapq.heappush(index.heaps[tier], entry)
    return least


def _relief(index: NodeIndex, tier: Tier, missing: int, free: list[int]) -> list[Decision]:
    """Decisions that free the missing bytes, empty when not all of them can be freed."""
    plan = Plan(index, dict(zip(Tier, free, strict=True)))
    try:
        short = plan.free(int(tier), missing)
    finally:
        plan.close()
    return [] if short > 0 else plan.decisions()


def _options(
    index: NodeIndex, policy: EvicPressPolicy, node_ids: Iterable[int], held: Collection[int]
) -> Iterator[PromotionOption]:
    for node_id in node_ids:
        candidate = index.candidates.get(node_id)
        if candidate is None or candidate.is_locked or node_id in held or not candidate.weight > 0.0:
            continue
        tier, exact_on, step = candidate.tier, candidate.exact_on, policy.step(candidate)
        if step is not None and step.key < 0.0 and step.tier < DROPPED:
            added = step.num_bytes if step.tier != tier else 0
            form = step.form or candidate.form
            yield _option(policy, candidate, step.tier, form, step.num_bytes, step.quality, step.delay_s, added, added)
        parent = index.parent(candidate)
        if tier > Tier.GPU and (parent is None or parent.tier == Tier.GPU):
            size = moved = candidate.num_bytes
            if candidate.form.codec != "raw" or candidate.form.is_uneven:
                size = policy.menu.num_bytes(candidate.form, candidate.num_tokens, candidate.sinks)
            yield _option(
                policy, candidate, Tier.GPU, candidate.form.decoded, size, candidate.quality, 0.0, size, moved
            )
        if exact_on is not None and exact_on > tier and not candidate.form.is_exact:
            size = policy.menu.num_bytes(EXACT, candidate.num_tokens)
            delay_s = policy.costs.load_seconds(Tier(tier), size)
            yield _option(policy, candidate, tier, EXACT, size, 1.0, delay_s, size - candidate.num_bytes, size)


def _option(
    policy: EvicPressPolicy,
    candidate: Candidate,
    tier: int,
    form: Form,
    num_bytes: int,
    quality: float,
    delay_s: float,
    added: int,
    moved: int,
) -> PromotionOption:
    current = utility(candidate.weight, policy.alpha, candidate.quality, policy.delay_s(candidate))
    gain = utility(candidate.weight, policy.alpha, quality, delay_s) - current
    order = -gain / max(moved, 1)
    return PromotionOption(order, candidate.id, tier, form, num_bytes, quality, delay_s, gain, added, moved)


def _seconds(policy: EvicPressPolicy, candidate: Candidate, option: PromotionOption) -> float:
    """Seconds of loading what moves, from the exact copy for an exact form."""
    if not option.moved_bytes:
        return 0.0
    if candidate.exact_on is not None and option.form.is_exact and not candidate.form.is_exact:
        return policy.costs.load_seconds(candidate.exact_on, option.moved_bytes)
    return policy.costs.load_seconds(Tier(candidate.tier), option.moved_bytes, candidate.form.codec)


def _decision(policy: EvicPressPolicy, candidate: Candidate, option: PromotionOption) -> Decision:
    stays = option.tier == candidate.tier
    return Decision(
        candidate.id,
        Option(candidate.form, Tier(candidate.tier), candidate.num_bytes),
        Option(option.form, Tier(option.tier), option.num_bytes),
        candidate.num_bytes - (option.num_bytes if stays else 0),
        candidate.weight,
        candidate.quality,
        option.quality,
        policy.delay_s(candidate),
        option.delay_s,
        -option.gain,
    )
