"""Bettering what is there: promotions, upgrades and gains in place when there is room or the exchange pays."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_evicpress.core import EXACT, Decision, Option, Tier
from sglang_evicpress.policy.book import DROPPED, Book, Record
from sglang_evicpress.policy.evicpress import EvicPressRule
from sglang_evicpress.policy.plan import Plan
from sglang_evicpress.utility import utility

MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rearrangement may move: bytes, and seconds of loading as the costs predict them."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of one node that raises its utility by ``gain`` (weighted), needs ``added_bytes`` on its tier and moves
    ``moved_bytes`` in ``seconds``."""

    gain: float
    added_bytes: int
    moved_bytes: int
    seconds: float
    decision: Decision

    @property
    def order(self) -> tuple[float, int]:
        return -self.gain / max(self.moved_bytes, 1), self.decision.node_id


def rearrange(book: Book, rule: EvicPressRule, room: Mapping[Tier, int], budget: Budget) -> list[Decision]:
    """Decisions, in order of execution, that together raise the total utility; empty when nothing does (EvicPress
    section 4.1: KV caches are re-arranged between tiers after re-profiling).

    A node may be brought to the GPU; to the exact form where a lower tier has an exact copy of it (an upgrade); or to a
    form or tier that is worth more in fewer bytes, which happens when its curve or a cost has changed. By gain per byte
    moved, within ``budget``. Where ``room`` does not suffice others make room if they lose less than is gained, at most
    once per tier and call: calling again goes on from there. O(n) in the nodes: for an idle moment, not for ``evict``.
    """
    free = [room.get(tier, 0) for tier in Tier]
    left_bytes, left_s = budget.num_bytes, budget.seconds
    decided: list[Decision] = []
    touched: set[int] = set()  # nodes decided on, and their parents: what is decided together must not meet in the tree

    def kin(node_id: int) -> set[int]:
        parent_id = book.records[node_id].parent_id
        return {node_id} if parent_id is None else {node_id, parent_id}

    for candidate in heapq.nsmallest(MAX_CANDIDATES, _candidates(book, rule), key=lambda found: found.order):
        tier, node_id = candidate.decision.option.tier, candidate.decision.node_id
        if candidate.moved_bytes > left_bytes or candidate.seconds > left_s or kin(node_id) & touched:
            continue
        relief: list[Decision] = []
        if tier is not None and candidate.added_bytes > free[tier]:
            missing = candidate.added_bytes - free[tier]
            relief = _relief(book, tier, missing, free)
            changed = {decision.node_id for decision in relief}
            if not relief or kin(node_id) & changed or touched & {one for other in changed for one in kin(other)}:
                continue
            if sum(decision.loss for decision in relief) >= candidate.gain:
                continue
        for decision in (*relief, candidate.decision):
            if decision.source.tier is not None:
                free[decision.source.tier] += decision.source.num_bytes
            if decision.option.tier is not None:
                free[decision.option.tier] -= decision.option.num_bytes
            touched |= kin(decision.node_id)
            decided.append(decision)
        left_bytes -= candidate.moved_bytes
        left_s -= candidate.seconds
    return decided


def _relief(book: Book, tier: Tier, missing: int, free: list[int]) -> list[Decision]:
    """What makes the room, empty when it cannot all be made."""
    plan = Plan(book, dict(zip(Tier, free, strict=True)))
    try:
        short = plan.relieve(int(tier), missing)
    finally:
        plan.close()
    return [] if short > 0 else plan.decisions()


def _candidates(book: Book, rule: EvicPressRule) -> Iterator[Candidate]:
    for record in book.records.values():
        if record.is_locked or not record.weight > 0.0:
            continue
        step = rule.step(record)
        if step is not None and step.key < 0.0:
            option = Option(step.form or record.form, Tier(step.rank), step.num_bytes) if step.rank < DROPPED else None
            if option is not None:
                moves = step.rank != record.rank
                added = step.num_bytes if moves else 0
                yield _candidate(rule, record, option, step.quality, step.delay_s, added, added)
        if record.rank > Tier.GPU and _parent_rank(book, record) == Tier.GPU:
            promoted = Option(record.form, Tier.GPU, record.num_bytes)
            yield _candidate(rule, record, promoted, record.quality, 0.0, record.num_bytes, record.num_bytes)
        if record.exact_on is not None and not record.form.is_exact:
            size = rule.menu.num_bytes(EXACT, record.num_tokens)
            delay_s = rule.costs.load_seconds(Tier(record.rank), size)
            added = size - record.num_bytes
            found = _candidate(rule, record, Option(EXACT, Tier(record.rank), size), 1.0, delay_s, added, size)
            if found.gain > 0.0:
                yield found


def _candidate(
    rule: EvicPressRule, record: Record, option: Option, quality: float, delay_s: float, added: int, moved: int
) -> Candidate:
    before_s = rule.delay_s(record)
    held = utility(record.weight, rule.alpha, record.quality, before_s)
    gain = utility(record.weight, rule.alpha, quality, delay_s) - held
    comes_from = (
        record.rank if record.exact_on is None or not option.form or not option.form.is_exact else record.exact_on
    )
    seconds = rule.costs.load_seconds(Tier(comes_from), moved) if moved else 0.0
    source = Option(record.form, Tier(record.rank), record.num_bytes)
    stays = option.tier == record.rank
    decision = Decision(
        record.id,
        source,
        option,
        record.num_bytes - (option.num_bytes if stays else 0),
        record.weight,
        record.quality,
        quality,
        before_s,
        delay_s,
        -gain,
    )
    return Candidate(gain, added, moved, seconds, decision)


def _parent_rank(book: Book, record: Record) -> int:
    """The rank of the parent; a node below the root can be on any tier."""
    parent = None if record.parent_id is None else book.records.get(record.parent_id)
    return Tier.GPU if parent is None else parent.rank
