"""Policies that only choose the victim: the form stays, the node goes one tier down or is dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from sglang_evicpress.core import Way
from sglang_evicpress.policy.base import DROPPED, Record, Step
from sglang_evicpress.policy.menu import Menu


class CascadeRule:
    """A node goes to the next tier below that can take it, as it is; from the last one it is dropped."""

    rises_only: ClassVar[bool] = True
    compresses: bool = False
    weighs_quality: ClassVar[bool] = False

    def __init__(self, menu: Menu) -> None:
        self.menu = menu

    def key(self, record: Record) -> float:
        """The smallest goes first, ties by last use; here the last use itself."""
        return float(record.last_use)

    def step(self, record: Record, barred: int = 0, ways: Sequence[Way] | None = None) -> Step | None:
        rank = self.next_rank(record, barred)
        if rank is None:
            return None
        if rank == DROPPED:
            return Step(self.key(record), DROPPED, None, 0)
        if ways is not None:
            way = next(way for way in ways if way.rank == rank)
            return Step(self.key(record), rank, way.form, way.num_bytes, way.quality)
        return Step(self.key(record), rank, None, record.num_bytes, record.quality)

    def next_rank(self, record: Record, barred: int) -> int | None:
        """The tier below that can take the node, DROPPED if none is left, None while a child is above that."""
        floor = record.floor
        if floor <= record.rank:
            return None
        for tier in self.menu.tiers:
            if tier > record.rank and not barred >> tier & 1:
                return int(tier) if tier <= floor else None
        return DROPPED if floor == DROPPED else None

    def delay_s(self, record: Record) -> float:
        return 0.0


class LruRule(CascadeRule):
    """Least recently used first, as SGLang's own radix cache."""

    name: ClassVar[str] = "lru"


class LfuRule(CascadeRule):
    """Least frequently used first, then least recently (SGLang's ``lfu``)."""

    name: ClassVar[str] = "lfu"

    def key(self, record: Record) -> float:
        return float(record.num_hits)


class SlruRule(CascadeRule):
    """Nodes used once before those used at least ``threshold`` times, each by last use (SGLang's ``slru``)."""

    name: ClassVar[str] = "slru"

    def __init__(self, menu: Menu, threshold: int = 2) -> None:
        super().__init__(menu)
        self.threshold = threshold

    def key(self, record: Record) -> float:
        return float(record.num_hits >= self.threshold)


class HptRule(CascadeRule):
    """Fewest hits per token first, then least recently used (``hpt``, proposed in sglang pull request 30300).

    The pull request is open and its arithmetic may change: the plain quotient of its name is used, over the logical
    tokens of the node, with nothing that lets old hits fade.
    """

    name: ClassVar[str] = "hpt"

    def key(self, record: Record) -> float:
        return record.num_hits / max(1, record.num_tokens)


class BeladyRule(CascadeRule):
    """The node whose next use is farthest away goes first (Belady, IBM Systems Journal 5(2), 1966).

    ``next_use`` maps a node to the time of its next use, in any unit; whoever knows the future keeps it up to date,
    for a node before the policy is told of its use. A node that is not in it is never used again. Optimal only for
    nodes of one size and cost in one tier: neither sizes nor delays are weighed.
    """

    name: ClassVar[str] = "belady"
    rises_only: ClassVar[bool] = False

    def __init__(self, menu: Menu, next_use: Mapping[int, float]) -> None:
        super().__init__(menu)
        self.next_use = next_use

    def key(self, record: Record) -> float:
        return -self.next_use.get(record.id, math.inf)
