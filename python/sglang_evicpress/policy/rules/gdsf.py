"""Frequency times cost per byte, with an age that rises as nodes leave."""

from __future__ import annotations

import math
from typing import ClassVar

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.base import Record
from sglang_evicpress.policy.cost_model import Costs
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadeRule


class GdsfRule(CascadeRule):
    """Greedy-Dual-Size-Frequency (Cherkasova, HP Labs technical report HPL-98-69R1, 1998).

    The node with the smallest ``age + frequency * cost / size`` goes first. Cost is the seconds of prefilling the
    node again behind its prefix, size its bytes. A tier's age rises to the key of whatever leaves it downwards; a
    node keeps the age at which it came or was last used, so that old hits count for ever less. Ages change only when
    a node really leaves, never by planning: within one plan all nodes of a tier that were in it keep their keys.

    Simplified: cost is that of prefilling on every tier, not of loading from the tier below. A node without bytes
    frees nothing and goes last.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, menu: Menu, costs: Costs) -> None:
        super().__init__(menu)
        self.costs = costs
        self._ages = [0.0] * len(Tier)
        self._since: dict[int, tuple[int, float]] = {}

    def read_costs(self, costs: Costs) -> None:
        """Take other costs; the book must be rebuilt after it."""
        self.costs = costs

    def key(self, record: Record) -> float:
        if not record.num_bytes:
            return math.inf
        rank, age = self._since[record.id]
        if rank != record.rank:  # a plan has moved it: it will come at the age of the tier it goes to
            age = self._ages[record.rank]
        cost_s = self.costs.prefill.marginal_seconds(record.num_tokens, record.depth_tokens)
        return age + max(1, record.num_hits) * cost_s / record.num_bytes

    def used(self, record: Record) -> None:
        self._since[record.id] = record.rank, self._ages[record.rank]

    def left(self, record: Record, rank: int) -> None:
        if rank > record.rank and record.num_bytes:
            self._ages[record.rank] = max(self._ages[record.rank], self.key(record))
        del self._since[record.id]
