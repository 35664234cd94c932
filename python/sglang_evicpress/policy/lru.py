"""Policies that only choose the victim: the form stays, the node goes one tier down or is dropped."""

from __future__ import annotations

from typing import ClassVar

from sglang_evicpress.policy.book import DROPPED, Record, Step
from sglang_evicpress.policy.menu import Menu


class CascadeRule:
    """A node goes to the next tier below that can take it, as it is; from the last one it is dropped."""

    rises_only: ClassVar[bool] = True

    def __init__(self, menu: Menu) -> None:
        self.menu = menu

    def key(self, record: Record) -> float:
        """The smallest goes first; ties by last use."""
        raise NotImplementedError

    def step(self, record: Record, barred: int = 0) -> Step | None:
        floor = record.floor
        if floor <= record.rank:
            return None
        for tier in self.menu.tiers:
            if tier > record.rank and not barred >> tier & 1:
                if tier > floor:
                    return None
                return Step(self.key(record), int(tier), None, record.num_bytes, record.quality)
        return Step(self.key(record), DROPPED, None, 0) if floor == DROPPED else None

    def delay_s(self, record: Record) -> float:
        return 0.0


class LruRule(CascadeRule):
    """Least recently used first, as SGLang's own radix cache."""

    name: ClassVar[str] = "lru"

    def key(self, record: Record) -> float:
        return float(record.last_use)


class LfuRule(CascadeRule):
    """Least frequently used first, then least recently."""

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
