"""Bettering what is there: promotions, upgrades and gains in place when there is room or the exchange pays."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_evicpress.core import EXACT, Decision, Form, Option, Tier
from sglang_evicpress.policy.base import DROPPED, Entry, Record
from sglang_evicpress.policy.index import Book
from sglang_evicpress.policy.plan import Plan
from sglang_evicpress.policy.rules.evicpress import EvicPressRule
from sglang_evicpress.policy.utility import utility

MAX_CANDIDATES = 64

CLEARLY = 1.0 + 1e-9
"""What comes must gain this much more than what is next to go loses, so that rounding does not decide."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one promotion: bytes, and seconds of loading as the costs predict them; and how many of the
    best changes it looks at closely, each of which may need a plan that makes room for it."""

    num_bytes: int
    seconds: float
    num_candidates: int = MAX_CANDIDATES


class Candidate(NamedTuple):
    """A change of one node that raises its utility by ``gain`` (weighted), needs ``added_bytes`` on the tier of
    ``rank`` and moves ``moved_bytes``. ``order`` sorts by gain per byte moved."""

    order: float
    node_id: int
    rank: int
    form: Form
    num_bytes: int
    quality: float
    delay_s: float
    gain: float
    added_bytes: int
    moved_bytes: int


def rearrange(
    book: Book, rule: EvicPressRule, room: Mapping[Tier, int], budget: Budget, held: Collection[int] = ()
) -> list[Decision]:
    """Decisions, in order of execution, that together raise the total utility; empty when nothing does (EvicPress
    section 4.1: KV caches are re-arranged between tiers after re-profiling). The nodes ``held`` (ids) are not bettered;
    they may make room for others.

    A node may be brought to the GPU; to the exact form where a lower tier has an exact copy of it (an upgrade); or to a
    form or tier that is worth more in fewer bytes, which happens when its curve or a cost has changed. By gain per byte
    moved, within ``budget``. Where ``room`` does not suffice others make room if they lose less than is gained, at most
    once per tier and call: calling again goes on from there. O(n) in the nodes: for an idle moment, not for ``evict``.

    Nothing comes to a tier, not even to free room, unless it gains more per byte than another node there would lose by
    its next step: it would be the next to leave. So what a plan has taken stays away until weights, curves or costs
    have changed. ``room`` should leave out what is kept free for new nodes. The bytes of a node that is brought up
    count as free where it was, an upgrade takes the difference: room for both at a time is the caller's to find.
    """
    free = [room.get(tier, 0) for tier in Tier]
    left_bytes, left_s = budget.num_bytes, budget.seconds
    decided: list[Decision] = []
    touched: set[int] = set()  # nodes decided on, and their parents: what is decided together must not meet in the tree

    def kin(node_id: int) -> set[int]:
        parent_id = book.records[node_id].parent_id
        return {node_id} if parent_id is None else {node_id, parent_id}

    least = [_least_per_byte(book, tier) for tier in Tier]

    def stays(candidate: Candidate) -> bool:
        per_byte = next((key for node_id, key in least[candidate.rank] if node_id != candidate.node_id), 0.0)
        return candidate.gain > per_byte * CLEARLY * candidate.added_bytes

    for candidate in heapq.nsmallest(budget.num_candidates, filter(stays, _candidates(book, rule, held))):
        node_id, record = candidate.node_id, book.records[candidate.node_id]
        seconds = _seconds(rule, record, candidate)
        if candidate.moved_bytes > left_bytes or seconds > left_s or kin(node_id) & touched:
            continue
        relief: list[Decision] = []
        missing = candidate.added_bytes - free[candidate.rank]
        if candidate.added_bytes > 0 and missing > 0:
            relief = _relief(book, Tier(candidate.rank), missing, free)
            changed = {decision.node_id for decision in relief}
            if not relief or kin(node_id) & changed or touched & {one for other in changed for one in kin(other)}:
                continue
            if sum(decision.loss for decision in relief) >= candidate.gain:
                continue
        for decision in (*relief, _decision(rule, record, candidate)):
            if decision.source.tier is not None:
                free[decision.source.tier] += decision.source.num_bytes
            if decision.option.tier is not None:
                free[decision.option.tier] -= decision.option.num_bytes
            touched |= kin(decision.node_id)
            decided.append(decision)
        left_bytes -= candidate.moved_bytes
        left_s -= seconds
    return decided


def _least_per_byte(book: Book, tier: Tier) -> list[tuple[int, float]]:
    """The two nodes of a tier whose steps come first, and what they lose per byte freed; without nodes of no bytes."""
    found: list[tuple[int, float]] = []
    taken: list[Entry] = []
    while len(found) < 2 and (first := book.first(int(tier))) is not None and not math.isinf(first[1].key):
        found.append((first[0].id, max(0.0, first[1].key)))
        taken.append(heapq.heappop(book.heaps[tier]))
    for entry in taken:
        heapq.heappush(book.heaps[tier], entry)
    return found


def _relief(book: Book, tier: Tier, missing: int, free: list[int]) -> list[Decision]:
    """Decisions that free the missing bytes, empty when not all of them can be freed."""
    plan = Plan(book, dict(zip(Tier, free, strict=True)))
    try:
        short = plan.relieve(int(tier), missing)
    finally:
        plan.close()
    return [] if short > 0 else plan.decisions()


def _candidates(book: Book, rule: EvicPressRule, held: Collection[int]) -> Iterator[Candidate]:
    # No entry lies above the present key of its node, so that these are all that gain by their next step, and more.
    gaining = {entry[2] for heap in book.heaps for entry in heap if entry[0] < 0.0}
    for record in book.records.values():
        rank, exact_on = record.rank, record.exact_on
        if record.is_locked or record.id in held or not record.weight > 0.0:
            continue
        if record.id in gaining and (step := rule.step(record)) is not None and step.key < 0.0 and step.rank < DROPPED:
            added = step.num_bytes if step.rank != rank else 0
            form = step.form or record.form
            yield _candidate(rule, record, step.rank, form, step.num_bytes, step.quality, step.delay_s, added, added)
        if rank > Tier.GPU and _parent_rank(book, record) == Tier.GPU:
            size = record.num_bytes
            yield _candidate(rule, record, Tier.GPU, record.form, size, record.quality, 0.0, size, size)
        if exact_on is not None and exact_on > rank and not record.form.is_exact:
            size = rule.menu.num_bytes(EXACT, record.num_tokens)
            delay_s = rule.costs.load_seconds(Tier(rank), size)
            yield _candidate(rule, record, rank, EXACT, size, 1.0, delay_s, size - record.num_bytes, size)


def _candidate(
    rule: EvicPressRule,
    record: Record,
    rank: int,
    form: Form,
    num_bytes: int,
    quality: float,
    delay_s: float,
    added: int,
    moved: int,
) -> Candidate:
    held = utility(record.weight, rule.alpha, record.quality, rule.delay_s(record))
    gain = utility(record.weight, rule.alpha, quality, delay_s) - held
    order = -gain / max(moved, 1)
    return Candidate(order, record.id, rank, form, num_bytes, quality, delay_s, gain, added, moved)


def _seconds(rule: EvicPressRule, record: Record, candidate: Candidate) -> float:
    """Seconds of loading what moves, from the exact copy for an upgrade."""
    if not candidate.moved_bytes:
        return 0.0
    if record.exact_on is not None and candidate.form.is_exact and not record.form.is_exact:
        return rule.costs.load_seconds(record.exact_on, candidate.moved_bytes)
    return rule.costs.load_seconds(Tier(record.rank), candidate.moved_bytes, candidate.form.codec)


def _decision(rule: EvicPressRule, record: Record, candidate: Candidate) -> Decision:
    stays = candidate.rank == record.rank
    return Decision(
        record.id,
        Option(record.form, Tier(record.rank), record.num_bytes),
        Option(candidate.form, Tier(candidate.rank), candidate.num_bytes),
        record.num_bytes - (candidate.num_bytes if stays else 0),
        record.weight,
        record.quality,
        candidate.quality,
        rule.delay_s(record),
        candidate.delay_s,
        -candidate.gain,
    )


def _parent_rank(book: Book, record: Record) -> int:
    """The rank of the parent; a node below the root can be on any tier."""
    parent = None if record.parent_id is None else book.records.get(record.parent_id)
    return Tier.GPU if parent is None else parent.rank
