"""Making room: the greedy over a book, tier by tier downwards, with nothing changed until it is carried out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_evicpress.core import DROP, Decision, Option, Tier, Way
from sglang_evicpress.policy.base import DROPPED, Entry, Record, Step
from sglang_evicpress.policy.forced_drops import Felling
from sglang_evicpress.policy.index import Book
from sglang_evicpress.policy.rules.evicpress import EvicPressRule

AHEAD, AHEAD_PER_STEP = 256, 4
"""Nodes that may not do what the book has them queued for, of which an urgent plan looks at so many, and so many more
per step, for what they may do instead. That can lose far more: to be sure of the least it would have to look at all."""

MAX_COMPARED = 16
"""Nodes whose changes are compared for the last step on a tier."""

NOTABLE_SHARE = 1 / 16
"""What the last step may free too much, of the bytes that stay on the tier, before a better one is looked for. The next
plan finds free what this one frees too much, so that in a large cache nothing is lost; always to look for the least
loss would prefer small nodes, over many plans, to those that lose least per byte."""


@dataclass(slots=True)
class Move:
    """Plan for one node: its copy in the state it will be in, the last step, and the sum of all losses;
    ``order`` is the number of the step that brought it where it will be."""

    copy: Record
    step: Step
    loss: float
    order: int


class Plan:
    """One plan over a book: ``relieve`` the tiers that are short, then read the ``decisions``.

    EvicPress section 4.4 and appendix A: when a tier is full, repeat the update of least utility drop until what must
    fit fits, and do the same on the lower tier if what is pushed down fills that. (The algorithm as printed assigns S
    where it must subtract what was freed.) ``room`` holds the free bytes of each tier below; a tier that is not in it
    is full. A node is planned on as a copy, so the book is after the plan what it was before.

    With ``ready`` the plan is urgent: nothing may wait for bytes to be written below. ``ready[node_id]`` are the copies
    that lie there; the node may become one of these, taking no room, and go to no other tier. What has shrunk in the
    plan may still become one. Nothing shrinks that is below the GPU, where it is written anew for that.
    """

    def __init__(self, book: Book, room: Mapping[Tier, int], ready: Mapping[int, Sequence[Way]] | None = None) -> None:
        self.book = book
        self.ready = ready
        self.room = [room.get(tier, 0) for tier in Tier]
        self.movable = [total - locked for total, locked in zip(book.num_bytes, book.locked_bytes, strict=True)]
        self.moves: dict[int, Move] = {}
        self._copies: dict[int, Record] = {}
        self._barred: dict[int, int] = {}
        self._heaps: list[list[Entry]] = [[] for _ in range(DROPPED)]
        self._waiting: list[list[Record]] = [[] for _ in range(DROPPED)]
        self._taken: list[list[Entry]] = [[] for _ in range(DROPPED)]
        self._num_steps = self._num_ahead = 0
        self._felling: Felling | None = None
        self._felled: set[int] = set()
        self._weigher = book.rule if isinstance(book.rule, EvicPressRule) else None

    def relieve(self, rank: int, num_bytes: int) -> int:
        """Plan to free ``num_bytes`` on a tier, no step taken once that is free; returns what is missing when
        everything that may move has moved."""
        notable = NOTABLE_SHARE * max(0, self.book.num_bytes[rank] - num_bytes)
        while num_bytes > 0:
            found = self._take_first(rank)
            if found is None:
                if (freed := self._fell(rank)) is None:
                    return num_bytes
                num_bytes -= freed
                continue
            copy, step = found
            excess = copy.num_bytes - (step.num_bytes if step.rank == rank else 0) - num_bytes
            if self._weigher is not None and excess > notable:
                copy, step = self._best_last(self._weigher, rank, num_bytes, copy, step)
            if self.ready is None and rank < step.rank < DROPPED and not self._make_room(step.rank, step.num_bytes):
                self._barred[copy.id] = self._barred.get(copy.id, 0) | 1 << step.rank
                self._queue(copy)
                continue
            num_bytes -= self._move(copy, step)
        return 0

    def decisions(self) -> list[Decision]:
        """The moves in an order that keeps every tier within its bounds and resident nodes prefix-closed: drops first,
        then lower tiers before higher ones, on each what shrinks in place before what arrives."""
        made: list[tuple[tuple[int, bool, int], Decision]] = []
        for move in self.moves.values():
            before, step = self.book.records[move.copy.id], move.step
            arrives = step.rank != before.rank
            freed = before.num_bytes - (0 if arrives else step.num_bytes)
            if freed == 0 and not self._is_needed(move):
                continue
            source = Option(before.form, Tier(before.rank), before.num_bytes)
            option = DROP if step.rank == DROPPED else Option(move.copy.form, Tier(step.rank), step.num_bytes)
            decision = Decision(
                before.id,
                source,
                option,
                freed,
                before.weight,
                before.quality,
                step.quality,
                self.book.rule.delay_s(before),
                step.delay_s,
                move.loss,
                before.id in self._felled,
            )
            made.append(((-step.rank, arrives, move.order), decision))
        made.sort(key=lambda item: item[0])
        return [decision for _, decision in made]

    def close(self) -> None:
        """Give the book's heaps back what was taken from them."""
        for heap, taken in zip(self.book.heaps, self._taken, strict=True):
            for entry in taken:
                heapq.heappush(heap, entry)
            taken.clear()

    def _best_last(
        self, weigher: EvicPressRule, rank: int, num_bytes: int, copy: Record, step: Step
    ) -> tuple[Record, Step]:
        """Best last step: of ``step`` and all changes of the first nodes that free ``num_bytes``, that of least loss.

        The greedy is as good as the linear relaxation but for its last step, and one change alone makes up for it
        (Kellerer et al., on greedy with the best split item). A byte missing below costs what is lost first there.
        """
        others: list[tuple[Record, Step]] = []
        while len(others) < MAX_COMPARED - 1 and (found := self._take_first(rank)) is not None:
            others.append(found)
        prices = [self._price(below) if below > rank and self.ready is None else 0.0 for below in range(DROPPED)]

        def cost(node: Record, choice: Step) -> float:
            loss = choice.loss * node.weight
            missing = choice.num_bytes - self.room[choice.rank] if rank < choice.rank < DROPPED else 0
            return loss + prices[choice.rank] * missing if missing > 0 else loss

        best, least = (copy, step), cost(copy, step)
        for node, _ in ((copy, step), *others):
            barred, ways = self._terms(node)
            for choice in weigher.choices(node, barred, num_bytes, ways):
                if choice.loss * node.weight < least and (loss := cost(node, choice)) < least:
                    best, least = (node, choice), loss
        for node, _ in ((copy, step), *others):
            if node is not best[0]:
                self._queue(node)
        return best

    def _price(self, rank: int) -> float:
        """Utility lost per byte by the next step of a tier, at least 0; infinite where nothing can be freed."""
        found = self._take_first(rank)
        if found is None:
            return math.inf
        self._queue(found[0])
        return max(0.0, found[1].key)

    def _make_room(self, rank: int, num_bytes: int) -> bool:
        """True if a lower tier has, or can be given, room for ``num_bytes``."""
        missing = num_bytes - self.room[rank]
        return missing <= 0 or (missing <= self.movable[rank] and self.relieve(rank, missing) == 0)

    def _move(self, copy: Record, step: Step) -> int:
        """Take the step; returns the bytes it frees on the tier the node was on."""
        rank, before = copy.rank, copy.num_bytes
        past = self.moves.pop(copy.id, None)
        loss = step.loss * copy.weight + (0.0 if past is None else past.loss)
        self._num_steps += 1
        # What shrinks after it has arrived keeps its turn: its parent may have arrived after it.
        order = self._num_steps if past is None or step.rank != rank else past.order
        self.moves[copy.id] = Move(copy, step, loss, order)
        if step.form is not None:
            copy.form = step.form
            copy.reachable &= self.book.rule.menu.smaller(step.form)
        copy.num_bytes, copy.quality = step.num_bytes, step.quality
        freed = before if step.rank != rank else before - step.num_bytes
        self.room[rank] += freed
        self.movable[rank] -= freed
        copy.rank, copy.memo, copy.queued = step.rank, None, None
        if step.rank != rank:
            if step.rank < DROPPED:
                self.room[step.rank] -= step.num_bytes
                self.movable[step.rank] += step.num_bytes
            self._tell_parent(copy, rank)
        if step.rank < DROPPED:
            self._queue(copy)
            if self._felling is not None and step.rank != rank:
                self._felling.arrive(copy)
        return freed

    def _tell_parent(self, copy: Record, old_rank: int) -> None:
        parent = None if copy.parent_id is None else self.book.records.get(copy.parent_id)
        if parent is None:
            return
        parent = self._copy(parent)
        parent.count_child(old_rank, -1)
        parent.count_child(copy.rank, 1)
        if parent.rank < DROPPED:
            self._queue(parent)

    def _queue(self, copy: Record) -> None:
        """Its next step is worked out when the tier is next looked at, if it is; an earlier entry of it is outdated."""
        copy.queued = None
        if not copy.is_locked:
            self._waiting[copy.rank].append(copy)

    def _queue_waiting(self, rank: int) -> None:
        for copy in self._waiting[rank]:
            if copy.rank == rank:
                self._push(copy)
        self._waiting[rank].clear()

    def _push(self, copy: Record) -> None:
        step = self.book.rule.step(copy, *self._terms(copy))
        copy.queued = None if step is None else (step.key, copy.last_use, copy.id)
        if copy.queued is not None:
            heapq.heappush(self._heaps[copy.rank], copy.queued)

    def _copy(self, record: Record) -> Record:
        copy = self._copies.get(record.id)
        if copy is None:
            copy = self._copies[record.id] = record.copy()
            if self.ready is not None and copy.rank > Tier.GPU:
                copy.reachable, copy.memo = 0, None
        return copy

    def _take_first(self, rank: int) -> tuple[Record, Step] | None:
        """The node whose step on the tier comes first, as a copy taken out of its heap, and the step."""
        book, own = self.book, self._heaps[rank]
        self._queue_waiting(rank)
        shared = self._first_shared(rank)
        while own and (self._copies[own[0][2]].queued is not own[0]):
            heapq.heappop(own)
        while self.ready is not None and shared is not None and not self._is_open(*shared, self.ready):
            if own and (own[0] < book.heaps[rank][0] or self._num_ahead >= self._num_steps * AHEAD_PER_STEP + AHEAD):
                shared = None
                break
            self._taken[rank].append(heapq.heappop(book.heaps[rank]))
            self._push(self._copy(shared[0]))
            self._num_ahead += 1
            shared = self._first_shared(rank)
        if own and (shared is None or own[0] < book.heaps[rank][0]):
            copy = self._copies[heapq.heappop(own)[2]]
            copy.queued = None
            step = book.rule.step(copy, *self._terms(copy))
            if step is None:
                raise RuntimeError(f"node {copy.id} lost its step while it was queued")
            return copy, step
        if shared is None:
            return None
        self._taken[rank].append(heapq.heappop(book.heaps[rank]))
        return self._copy(shared[0]), shared[1]

    def _first_shared(self, rank: int) -> tuple[Record, Step] | None:
        """The first of the book's nodes that is not planned on yet, with the step it would take in a normal plan."""
        while (found := self.book.first(rank)) is not None and found[0].id in self._copies:
            self._taken[rank].append(heapq.heappop(self.book.heaps[rank]))
        return found

    @staticmethod
    def _is_open(record: Record, step: Step, ready: Mapping[int, Sequence[Way]]) -> bool:
        """True if an urgent plan may take the step; being the best of all, it is then the best of those it may take.
        Not where a copy is something else than the node: that could be better still."""
        ways = ready.get(record.id, ())
        if any(way.num_bytes != record.num_bytes or way.form != record.form for way in ways):
            return False
        if step.rank == DROPPED or step.rank == record.rank == Tier.GPU:
            return True
        return step.form in (None, record.form) and any(way.rank == step.rank for way in ways)

    def _terms(self, copy: Record) -> tuple[int, Sequence[Way] | None]:
        """The tiers that are barred to the node, and, in an urgent plan, as what alone it may leave."""
        if self.ready is None:
            return self._barred.get(copy.id, 0), None
        ways, barred = self.ready.get(copy.id, ()), (1 << DROPPED) - 1
        for way in ways:
            barred &= ~(1 << way.rank)
        return barred, ways

    def _fell(self, rank: int) -> int | None:
        """The last resort, when no node has a step: drop what ``Felling`` says; the bytes freed here, or None."""
        records, copies = self.book.records, self._copies
        if self._felling is None:
            standing = (copies.get(node_id, record) for node_id, record in records.items())
            self._felling = Felling(standing, self.ready or {})
        felled = self._felling.next(rank, lambda one: copies.get(one) or records[one])
        freed = sum(one.record.num_bytes for one in felled if one.record.rank == rank)
        for one in felled:
            copy = self._copy(one.record)
            if one.way is None:
                self._felled.add(copy.id)
                self._move(copy, self._drop(copy))
            else:
                self._move(copy, self._become(copy, one.way))
        return freed if felled else None

    def _drop(self, record: Record) -> Step:
        if self._weigher is None:
            return Step(0.0, DROPPED, None, 0)
        worth = self._weigher.ways_out(record)[0][4]
        now = self._weigher.alpha * record.quality - self._weigher.delay_s(record)
        return Step(0.0, DROPPED, None, 0, 1.0, self._weigher.alpha - worth, now - worth)

    def _become(self, record: Record, way: Way) -> Step:
        """The node as a copy of it that lies below."""
        if self._weigher is None:
            return Step(0.0, way.rank, way.form, way.num_bytes, way.quality)
        delay_s = self._weigher.costs.load_seconds(Tier(way.rank), way.num_bytes, way.form.codec)
        now = self._weigher.alpha * record.quality - self._weigher.delay_s(record)
        loss = now - (self._weigher.alpha * way.quality - delay_s)
        return Step(0.0, way.rank, way.form, way.num_bytes, way.quality, delay_s, loss)

    def _is_needed(self, move: Move) -> bool:
        """True if a move frees bytes or, holding none, makes way for one above it that does."""
        while True:
            before, step = self.book.records[move.copy.id], move.step
            if before.num_bytes > (step.num_bytes if step.rank == before.rank else 0):
                return True
            above = None if before.parent_id is None else self.moves.get(before.parent_id)
            if above is None or above.step.rank <= before.rank:
                return False
            move = above
