"""Making room: the greedy over an index, tier by tier downwards, with nothing changed until it is carried out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_evicpress.core import DROP, Decision, LowerCopy, Option, Tier
from sglang_evicpress.policy.base import DROPPED, Candidate, Entry, Step, lower_bytes
from sglang_evicpress.policy.cost_model import TransferCost
from sglang_evicpress.policy.forced_drops import ForcedDrops
from sglang_evicpress.policy.index import NodeIndex
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.tree_options import lost_by_copying, tree_options
from sglang_evicpress.policy.tree_search import CLOSE, MIDDLING, SMALL, Choice, TreeSearch

AHEAD, AHEAD_PER_STEP = 32, 4
"""Nodes that may not do what the index has them queued for, of which an urgent plan looks at so many, and so many more
per step, for what they may do instead. That can lose far more: to be sure of the least it would have to look at all."""

MANY_ON_GPU, AHEAD_OF_MANY = 1024, 8
"""Nodes on the GPU from which on it looks at so many, and as many more per step: each takes 20 us while a request
waits, and is a small part of the GPU."""

MAX_COMPARED = 16
"""Nodes whose changes are compared for the last step on a tier."""

SCARCE_SHARE = 1 / 4
"""Of a lower tier: with less of it free, its bytes are worth something to what arrives."""

NOTABLE_SHARE = 1 / 16
"""What the last step may free too much, of the bytes that stay on the tier, before a better one is looked for. The next
plan finds free what this one frees too much, so that in a large cache nothing is lost; always to look for the least
loss would prefer small nodes, over many plans, to those that lose least per byte."""

LARGE_SHARE = 1 / 4
"""Of all nodes: a plan that nobody waits for and that moves so many takes long already: it is compared with a search
of the whole tree even if that is not small."""


@dataclass(slots=True)
class Move:
    """Plan for one node: its copy in the state it will be in, the last step, and the sum of all losses;
    ``order`` is the number of the step that brought it where it will be."""

    copy: Candidate
    step: Step
    loss: float
    order: int


class Plan:
    """One plan over an index: ``free`` the tiers that are short, then read the ``decisions``.

    EvicPress section 4.4 and appendix A: when a tier is full, repeat the update of least utility drop until what must
    fit fits, and do the same on the lower tier if what is pushed down fills that. (The algorithm as printed assigns S
    where it must subtract what was freed.) ``room`` holds the free bytes of each tier below; a tier that is not in it
    is full. A node is planned on as a copy, so the index is after the plan what it was before.

    With ``lower_copies_of`` the plan is urgent: nothing may wait for bytes to be written below.
    ``lower_copies_of[node_id]`` are the copies that lie there; the node may become one of these, taking no room, and go
    to no other tier. What has shrunk in the plan may still become one. Nothing shrinks that is below the GPU, where it
    is written anew for that. ``copy_loss``: utility that copying a node off the GPU takes.
    """

    def __init__(
        self,
        index: NodeIndex,
        room: Mapping[Tier, int],
        lower_copies_of: Mapping[int, Sequence[LowerCopy]] | None = None,
        copy_loss: TransferCost | None = None,
    ) -> None:
        self.index = index
        self._copy_loss = copy_loss if lower_copies_of is None else None  # an urgent plan copies nothing
        index.num_passed = 0
        self.lower_copies_of = lower_copies_of
        self.room = [room.get(tier, 0) for tier in Tier]
        self._room_at_first = list(self.room)
        self.movable = [total - locked for total, locked in zip(index.num_bytes, index.locked_bytes, strict=True)]
        self.moves: dict[int, Move] = {}
        self._copies: dict[int, Candidate] = {}
        self._excluded_tiers: dict[int, int] = {}
        self._heaps: list[list[Entry]] = [[] for _ in range(DROPPED)]
        self._waiting: list[list[Candidate]] = [[] for _ in range(DROPPED)]
        self._taken: list[list[Entry]] = [[] for _ in range(DROPPED)]
        self._prices: dict[int, float] = {}
        self._num_steps = self._num_ahead = 0
        self._most_ahead = AHEAD_OF_MANY if index.num_on[Tier.GPU] >= MANY_ON_GPU else AHEAD
        self._keys = [0.0] * DROPPED
        self._forced_drops: ForcedDrops | None = None
        self._forced: set[int] = set()
        self._weigher = index.policy if isinstance(index.policy, EvicPressPolicy) else None

    def free(self, tier: int, num_bytes: int, most_nodes: float = math.inf) -> int:
        """Plan to free ``num_bytes`` on a tier, no step taken once that is free or ``most_nodes`` move; returns what is
        missing then, or when everything that may move has moved."""
        notable = NOTABLE_SHARE * max(0, self.index.num_bytes[tier] - num_bytes)
        while num_bytes > 0 and len(self.moves) < most_nodes:
            first = self._take_first(tier)
            if first is None:
                if (freed := self._force_drops(tier)) is None:
                    return num_bytes
                num_bytes -= freed
                continue
            copy, step = first
            if math.isfinite(step.key):
                self._keys[tier] = max(self._keys[tier], step.key)
            excess = copy.num_bytes - (step.num_bytes if step.tier == tier else 0) - num_bytes
            if self._weigher is not None and excess > notable:
                copy, step = self._best_last(self._weigher, tier, num_bytes, copy, step)
            needs_room = self.lower_copies_of is None and tier < step.tier < DROPPED
            if needs_room and self._weigher is not None:
                step = self._worth_copying(copy, self._priced(self._weigher, copy, step))
                needs_room = step.tier < DROPPED
            if needs_room and not self._make_room(step.tier, step.num_bytes):
                self._excluded_tiers[copy.id] = self._excluded_tiers.get(copy.id, 0) | 1 << step.tier
                self._queue(copy)
                continue
            num_bytes -= self._move(copy, step)
        return max(0, num_bytes)

    def search(self, tier: int, num_bytes: int, least_loss: float = 0.0) -> None:
        """Plan anew, as a whole, what ``free`` has planned node by node, where the tree is small and that is clearly
        worth more: with few nodes, of which each is much, the greedy can be far from the best (it lets a child leave
        first, and its parent can then no longer be dropped). Not where no more than ``least_loss`` is lost."""
        num, weigher, candidates = len(self.index.candidates), self._weigher, self.index.candidates
        is_long = self.lower_copies_of is None and num <= MIDDLING and len(self.moves) >= LARGE_SHARE * num
        if weigher is None or not self.moves or not (num <= SMALL or is_long):
            return
        lost = sum(move.loss for move in self.moves.values())
        if least_loss > 0.0 and lost <= least_loss:
            return
        worths = [self._worth_keeping(weigher, candidate) for candidate in candidates.values()]
        lowest, highest = (sum(worth for worth in worths if worth * sign > 0.0) for sign in (-1.0, 1.0))
        if lost - lowest <= CLOSE * highest:
            return
        options = tree_options(candidates.values(), weigher, tier, self.lower_copies_of, self._copy_loss)
        if options is None:
            return
        numbers = {candidate.id: number for number, candidate in enumerate(options.candidates)}
        places, slots = options.places.copy(), np.zeros(len(numbers), np.int64)
        for move in self.moves.values():
            number, step = numbers[move.copy.id], move.step
            places[number] = place = options.tiers.index(step.tier)
            slots[number] = options.slot(number, place, step.num_bytes)
        now = float(options.worth[np.arange(len(numbers)), options.places, 0].sum())
        for move in self.moves.values():
            lost += lost_by_copying(self._copy_loss, candidates[move.copy.id], move.step.tier, move.step.num_bytes)
        capacity = [self._capacity(one, tier, num_bytes) for one in options.tiers[:-1]]
        keys = [self._keys[one] for one in options.tiers[:-1]]
        better = TreeSearch(options, capacity).better(Choice(now - lost, places, slots), [*keys, 0.0])
        if better is None:
            return
        self.moves.clear()
        self._forced.clear()
        for number, (place, slot) in enumerate(zip(better.places.tolist(), better.slots.tolist(), strict=True)):
            if place != options.places[number] or slot != 0:
                copy, step = options.candidates[number].copy(), options.step(weigher, number, place, slot)
                copy.form = copy.form if step.form is None else step.form
                self.moves[copy.id] = Move(copy, step, step.loss * copy.weight, len(numbers) - number)

    def _capacity(self, tier: int, short: int, num_bytes: int) -> float:
        """Bytes that a tier may hold after a plan that frees ``num_bytes`` on the tier ``short``."""
        held = self.index.num_bytes
        if tier < short or (self.lower_copies_of is not None and tier > short):
            return math.inf
        capacity = held[tier] + (-num_bytes if tier == short else self._room_at_first[tier])
        return math.inf if capacity >= sum(held) else capacity

    def _worth_keeping(self, weigher: EvicPressPolicy, candidate: Candidate) -> float:
        """Utility of a node over that of dropping it."""
        quality, delay_s = weigher.dropped(candidate)
        kept = weigher.alpha * (candidate.quality - quality) - weigher.delay_s(candidate) + delay_s
        return candidate.weight * kept

    def _priced(self, weigher: EvicPressPolicy, copy: Candidate, step: Step) -> Step:
        """``step``, to a lower tier, or the same in the form of which the bytes pay there: each costs what that tier
        loses next for one. In what has most utility the node would be the next to shrink there, once more of work. A
        drop where there is no room, and to make it would lose more."""
        price = self._price_of_room(step.tier)
        if price <= 0.0:
            return step
        best, least = step, step.loss * copy.weight + price * step.num_bytes
        excluded_tiers, _ = self._terms(copy)
        for choice in weigher.choices(copy, excluded_tiers):
            cost = choice.loss * copy.weight + price * choice.num_bytes
            if choice.tier == step.tier and cost < least and choice.num_bytes < step.num_bytes:
                best, least = choice, cost
        missing = best.num_bytes - self.room[best.tier]
        if missing > 0:
            drops = [choice for choice in weigher.choices(copy, excluded_tiers) if choice.tier == DROPPED]
            if drops and drops[0].loss * copy.weight < best.loss * copy.weight + price * missing:
                return drops[0]
        return best

    def _worth_copying(self, copy: Candidate, step: Step) -> Step:
        """``step``, or a drop where that loses less than copying the node off the GPU takes: the short end of a request
        that nobody is likely to continue. What lies below in any form stays: a drop would cost that as well."""
        took = lost_by_copying(self._copy_loss, copy, step.tier, step.num_bytes)
        if took <= 0.0 or copy.lower_copies or copy.lowest_tier < DROPPED:
            return step
        drop = self._drop(copy)
        return drop if drop.loss * copy.weight < step.loss * copy.weight + took else step

    def _price_of_room(self, tier: int) -> float:
        """What a byte of a tier is worth to this plan: nothing until little of it is free."""
        price = self._prices.get(tier)
        if price is None:
            room = self.room[tier]
            is_scarce = room < SCARCE_SHARE * (room + self.index.num_bytes[tier])
            price = self._price(tier) if is_scarce else 0.0
            price = self._prices[tier] = 0.0 if math.isinf(price) else price
        return price

    def decisions(self) -> list[Decision]:
        """The moves in an order that keeps every tier within its bounds and resident nodes prefix-closed: drops first,
        then lower tiers before higher ones, on each what shrinks in place before what arrives."""
        made: list[tuple[tuple[int, bool, int], Decision]] = []
        for move in self.moves.values():
            before, step = self.index.candidates[move.copy.id], move.step
            arrives = step.tier != before.tier
            freed = before.num_bytes - (0 if arrives else step.num_bytes)
            if freed == 0 and not self._is_needed(move):
                continue
            source = Option(before.form, Tier(before.tier), before.num_bytes)
            option = DROP if step.tier == DROPPED else Option(move.copy.form, Tier(step.tier), step.num_bytes)
            decision = Decision(
                before.id,
                source,
                option,
                freed,
                before.weight,
                before.quality,
                step.quality,
                self.index.policy.delay_s(before),
                step.delay_s,
                move.loss,
                before.id in self._forced,
            )
            made.append(((-step.tier, arrives, move.order), decision))
        made.sort(key=lambda item: item[0])
        return [decision for _, decision in made]

    def close(self) -> None:
        """Give the index's heaps back what was taken from them."""
        for heap, taken in zip(self.index.heaps, self._taken, strict=True):
            for entry in taken:
                heapq.heappush(heap, entry)
            taken.clear()

    def _best_last(
        self, weigher: EvicPressPolicy, tier: int, num_bytes: int, copy: Candidate, step: Step
    ) -> tuple[Candidate, Step]:
        """Best last step: of ``step`` and all changes of the first nodes that free ``num_bytes``, that of least loss.

        The greedy is as good as the linear relaxation but for its last step, and one change alone makes up for it
        (Kellerer et al., on greedy with the best split item). A byte missing below costs what is lost first there.
        """
        others: list[tuple[Candidate, Step]] = []
        while len(others) < MAX_COMPARED - 1 and (first := self._take_first(tier)) is not None:
            others.append(first)
        prices = [
            self._price(below) if below > tier and self.lower_copies_of is None else 0.0 for below in range(DROPPED)
        ]

        def cost(node: Candidate, choice: Step) -> float:
            loss = choice.loss * node.weight
            missing = choice.num_bytes - self.room[choice.tier] if tier < choice.tier < DROPPED else 0
            return loss + prices[choice.tier] * missing if missing > 0 else loss

        best, least = (copy, step), cost(copy, step)
        for node, _ in ((copy, step), *others):
            excluded_tiers, lower_copies = self._terms(node)
            for choice in weigher.choices(node, excluded_tiers, num_bytes, lower_copies):
                if choice.loss * node.weight < least and (loss := cost(node, choice)) < least:
                    best, least = (node, choice), loss
        for node, _ in ((copy, step), *others):
            if node is not best[0]:
                self._queue(node)
        return best

    def _price(self, tier: int) -> float:
        """Utility lost per byte by the next step of a tier, at least 0; infinite where nothing can be freed."""
        first = self._take_first(tier)
        if first is None:
            return math.inf
        self._queue(first[0])
        return max(0.0, first[1].key)

    def _make_room(self, tier: int, num_bytes: int) -> bool:
        """True if a lower tier has, or can be given, room for ``num_bytes``."""
        missing = num_bytes - self.room[tier]
        return missing <= 0 or (missing <= self.movable[tier] and self.free(tier, missing) == 0)

    def _move(self, copy: Candidate, step: Step) -> int:
        """Take the step; returns the bytes it frees on the tier the node was on."""
        tier, before = copy.tier, copy.num_bytes
        past = self.moves.pop(copy.id, None)
        loss = step.loss * copy.weight + (0.0 if past is None else past.loss)
        self._num_steps += 1
        # What shrinks after it has arrived keeps its turn: its parent may have arrived after it.
        order = self._num_steps if past is None or step.tier != tier else past.order
        self.moves[copy.id] = Move(copy, step, loss, order)
        if step.form is not None:
            if step.form.pressed != copy.form.pressed:
                copy.filled = self.index.policy.menu.filled(step.form, copy.num_tokens, copy.sinks)
            copy.form = step.form
            copy.allowed_forms &= self.index.policy.menu.smaller(step.form)
        copy.num_bytes, copy.quality = step.num_bytes, step.quality
        freed = before if step.tier != tier else before - step.num_bytes
        self.room[tier] += freed
        self.movable[tier] -= freed
        copy.tier, copy.memo, copy.queued = step.tier, None, None
        if step.tier != tier:
            if step.tier < DROPPED:
                self.room[step.tier] -= step.num_bytes
                self.movable[step.tier] += step.num_bytes
            self._tell_parent(copy, tier)
        if step.tier < DROPPED:
            self._queue(copy)
            if self._forced_drops is not None and step.tier != tier:
                self._forced_drops.arrive(copy)
        return freed

    def _tell_parent(self, copy: Candidate, old_tier: int) -> None:
        parent = self.index.parent(copy)
        if parent is None:
            return
        parent = self._copy(parent)
        parent.count_child(old_tier, -1)
        parent.count_child(copy.tier, 1)
        if parent.tier < DROPPED:
            self._queue(parent)

    def _queue(self, copy: Candidate) -> None:
        """Its next step is worked out when the tier is next looked at, if it is; an earlier entry of it is outdated."""
        copy.queued = None
        if not copy.is_locked:
            self._waiting[copy.tier].append(copy)

    def _push(self, copy: Candidate) -> None:
        step = self.index.policy.step(copy, *self._terms(copy))
        copy.queued = None if step is None else (step.key, copy.last_use, copy.id)
        if copy.queued is not None:
            heapq.heappush(self._heaps[copy.tier], copy.queued)

    def _copy(self, candidate: Candidate) -> Candidate:
        copy = self._copies.get(candidate.id)
        if copy is None:
            copy = self._copies[candidate.id] = candidate.copy()
            if self.lower_copies_of is not None and copy.tier > Tier.GPU:
                copy.allowed_forms, copy.memo = 0, None
        return copy

    def _take_first(self, tier: int) -> tuple[Candidate, Step] | None:
        """The node whose step on the tier comes first, as a copy taken out of its heap, and the step."""
        index, own = self.index, self._heaps[tier]
        for copy in self._waiting[tier]:
            if copy.tier == tier:
                self._push(copy)
        self._waiting[tier].clear()
        shared = self._first_shared(tier)
        while own and (self._copies[own[0][2]].queued is not own[0]):
            heapq.heappop(own)
        while (
            self.lower_copies_of is not None and shared is not None and not self._is_open(*shared, self.lower_copies_of)
        ):
            if own and (own[0] < index.heaps[tier][0] or self._has_looked_ahead):
                shared = None
                break
            self._taken[tier].append(heapq.heappop(index.heaps[tier]))
            self._push(self._copy(shared[0]))
            self._num_ahead += 1
            shared = self._first_shared(tier)
        if own and (shared is None or own[0] < index.heaps[tier][0]):
            copy = self._copies[heapq.heappop(own)[2]]
            copy.queued = None
            step = index.policy.step(copy, *self._terms(copy))
            if step is None:
                raise RuntimeError(f"node {copy.id} lost its step while it was queued")
            return copy, step
        if shared is None:
            return None
        self._taken[tier].append(heapq.heappop(index.heaps[tier]))
        return self._copy(shared[0]), shared[1]

    @property
    def _has_looked_ahead(self) -> bool:
        return self._num_ahead >= self._most_ahead + self._num_steps * AHEAD_PER_STEP

    def _first_shared(self, tier: int) -> tuple[Candidate, Step] | None:
        """The first of the index's nodes that is not planned on yet, with the step it would take in a normal plan."""
        while (first := self.index.first(tier)) is not None and first[0].id in self._copies:
            self._taken[tier].append(heapq.heappop(self.index.heaps[tier]))
        return first

    def _is_open(self, candidate: Candidate, step: Step, lower_copies_of: Mapping[int, Sequence[LowerCopy]]) -> bool:
        """True if an urgent plan may take the step; being the best of all, it is then the best of those it may take.
        Not where a copy is something else than the node: that could be better still."""
        lower_copies = lower_copies_of.get(candidate.id, ())
        num_bytes = lower_bytes(self.index.policy.menu, candidate)
        if any(lower_copy.num_bytes != num_bytes or lower_copy.form != candidate.form for lower_copy in lower_copies):
            return False
        if step.tier == DROPPED or step.tier == candidate.tier == Tier.GPU:
            return True
        return step.form in (None, candidate.form) and any(lower_copy.tier == step.tier for lower_copy in lower_copies)

    def _terms(self, copy: Candidate) -> tuple[int, Sequence[LowerCopy] | None]:
        """The tiers that are excluded to the node, and, in an urgent plan, as what alone it may leave."""
        if self.lower_copies_of is None:
            return self._excluded_tiers.get(copy.id, 0), None
        lower_copies, excluded_tiers = self.lower_copies_of.get(copy.id, ()), (1 << DROPPED) - 1
        for lower_copy in lower_copies:
            excluded_tiers &= ~(1 << lower_copy.tier)
        return excluded_tiers, lower_copies

    def _force_drops(self, tier: int) -> int | None:
        """The last resort, when no node has a step: drop what ``ForcedDrops`` says; the bytes freed here, or None."""
        candidates, copies = self.index.candidates, self._copies
        if self._forced_drops is None:
            standing = (copies.get(node_id, candidate) for node_id, candidate in candidates.items())
            self._forced_drops = ForcedDrops(standing, self.lower_copies_of or {})
        drops = self._forced_drops.next(tier, lambda one: copies.get(one) or self.index.candidates[one])
        freed = sum(one.candidate.num_bytes for one in drops if one.candidate.tier == tier)
        for one in drops:
            copy = self._copy(one.candidate)
            if one.lower_copy is None:
                self._forced.add(copy.id)
                self._move(copy, self._drop(copy))
            else:
                self._move(copy, self._become(copy, one.lower_copy))
        return freed if drops else None

    def _drop(self, candidate: Candidate) -> Step:
        if self._weigher is None:
            return Step(0.0, DROPPED, None, 0)
        quality, delay_s = self._weigher.dropped(candidate)
        worth = self._weigher.alpha * quality - delay_s
        now = self._weigher.alpha * candidate.quality - self._weigher.delay_s(candidate)
        return Step(0.0, DROPPED, None, 0, 1.0, self._weigher.alpha - worth, now - worth)

    def _become(self, candidate: Candidate, lower_copy: LowerCopy) -> Step:
        """The node as a copy of it that lies below."""
        if self._weigher is None:
            return Step(0.0, lower_copy.tier, lower_copy.form, lower_copy.num_bytes, lower_copy.quality)
        delay_s = self._weigher.costs.load_seconds(Tier(lower_copy.tier), lower_copy.num_bytes, lower_copy.form.codec)
        now = self._weigher.alpha * candidate.quality - self._weigher.delay_s(candidate)
        loss = now - (self._weigher.alpha * lower_copy.quality - delay_s)
        return Step(0.0, lower_copy.tier, lower_copy.form, lower_copy.num_bytes, lower_copy.quality, delay_s, loss)

    def _is_needed(self, move: Move) -> bool:
        """True if a move frees bytes or, holding none, makes way for one above it that does."""
        while True:
            before, step = self.index.candidates[move.copy.id], move.step
            if before.num_bytes > (step.num_bytes if step.tier == before.tier else 0):
                return True
            above = None if before.parent_id is None else self.moves.get(before.parent_id)
            if above is None or above.step.tier <= before.tier:
                return False
            move = above
