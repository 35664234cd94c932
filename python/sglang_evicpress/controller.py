"""Turns the policy's decisions into moves and keeps count of what was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from sglang_evicpress.core import Decision, Form, Tier, Way
from sglang_evicpress.journal import Journal
from sglang_evicpress.policy.base import Policy


class Moves(Protocol):
    """What the radix tree lets the controller do; only the scheduler thread calls it. Each move tells the policy."""

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node to a smaller form in place; returns the slots freed."""

    def drop(self, node_id: int) -> int:
        """Forget a childless node; returns the slots freed."""

    def send(self, node_id: int, tier: Tier, form: Form) -> int:
        """Bring a node to a lower tier, at once or in the background; returns the slots freed now."""


class Controller:
    """The only one that compresses or drops because memory is short.

    ``policy`` is replaced when the cache is flushed. ``now_s`` and ``value_of_hit`` are the logical time and what a hit
    is worth at it, for the journal.
    """

    def __init__(self, moves: Moves) -> None:
        self.policy: Policy
        self.moves = moves
        self.now_s = 0.0
        self.value_of_hit = 1.0
        self.journal = Journal()
        self.num_compressed: Counter[str] = Counter()
        self.num_demoted: Counter[str] = Counter()
        self.num_dropped = 0
        self.freed_slots = 0
        self.dropped_tokens = 0

    def relieve(
        self,
        tier: Tier,
        num_bytes: int,
        *,
        room: Mapping[Tier, int] | None = None,
        ready: Mapping[int, Sequence[Way]] | None = None,
    ) -> int:
        """Free ``num_bytes`` on ``tier`` if the unlocked nodes hold that many; returns the slots freed at once.

        See ``Policy.plan`` for ``room`` and ``ready``: with ``ready`` nothing is left to be freed later.
        """
        return self.carry_out(self.policy.plan(tier, num_bytes, room, ready=ready))

    def carry_out(self, decisions: Iterable[Decision]) -> int:
        """Make the moves of a plan, which must be of the tree as it is; returns the slots freed at once."""
        freed = 0
        for decision in decisions:
            option = decision.option
            if decision.node_id not in self.policy.book.records:
                continue  # a move before it made room below, which cost it
            self.journal.add(decision, self.now_s, self.value_of_hit)
            if option.is_drop:
                self.dropped_tokens += self.policy.book.records[decision.node_id].num_tokens
                self.num_dropped += 1
                freed += self.moves.drop(decision.node_id)
            elif option.tier == decision.source.tier and option.form is not None:
                self.num_compressed[str(option.form)] += 1
                freed += self.moves.compress(decision.node_id, option.form)
            elif option.tier is not None and option.form is not None:
                self.num_demoted[option.tier.label] += 1
                freed += self.moves.send(decision.node_id, option.tier, option.form)
        self.freed_slots += freed
        return freed
