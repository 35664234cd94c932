"""Turns the policy's decisions into moves on the device tier and keeps count of what was done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

from sglang_evicpress.core import Decision, Form, NodeStats
from sglang_evicpress.policy.base import Policy

JOURNAL_LENGTH = 256


class DeviceTier(Protocol):
    """What the radix tree lets the controller do; only the scheduler thread calls it."""

    def snapshot(self) -> Sequence[NodeStats]:
        """Every unlocked node with the options it has now, in a stable order (equal on every rank)."""

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node to a smaller form in place; returns the slots freed."""

    def drop(self, node_id: int) -> int:
        """Forget a childless node; returns the slots freed."""


class Controller:
    """The only one that compresses or drops because memory is short."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.journal: deque[Decision] = deque(maxlen=JOURNAL_LENGTH)
        self.num_compressed: Counter[str] = Counter()
        self.num_dropped = 0
        self.freed_slots = 0
        self.dropped_tokens = 0

    def relieve(self, tier: DeviceTier, demand_slots: int) -> int:
        """Free at least ``demand_slots`` if the unlocked nodes hold that many; returns the slots really freed."""
        if demand_slots <= 0:
            return 0
        nodes = tier.snapshot()
        tokens = {node.id: node.num_tokens for node in nodes}
        freed = 0
        for decision in self.policy.plan(nodes, demand_slots):
            form = decision.option.form
            if form is None:
                freed += tier.drop(decision.node_id)
                self.num_dropped += 1
                self.dropped_tokens += tokens[decision.node_id]
            else:
                freed += tier.compress(decision.node_id, form)
                self.num_compressed[str(form)] += 1
            self.journal.append(decision)
        self.freed_slots += freed
        return freed
