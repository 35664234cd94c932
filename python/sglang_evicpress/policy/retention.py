"""Nodes that requests asked to retain: a higher expected reuse, for a time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

MOST_NODES = 65_536
"""Retained at a time; what is asked for beyond that is not."""

LEAST_DUE = 1024
"""Times that are noted before those are forgotten that no longer hold."""


@dataclass(frozen=True, slots=True)
class Retained:
    """Until when, in logical seconds, a node counts as used ``rate`` times a second more."""

    until_s: float
    rate: float


class Retention:
    """One more use is expected of a node within the seconds that were asked for. Pure: equal on every rank where what
    it is told is."""

    def __init__(self) -> None:
        self._retained: dict[int, Retained] = {}
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._retained)

    def hold(self, node_id: int, now_s: float, seconds: float) -> None:
        """Retain a node for so long from now on; the longer of two wins."""
        known, until_s = self._retained.get(node_id), now_s + seconds
        if known is None and len(self._retained) >= MOST_NODES:
            return
        if known is None or known.until_s < until_s:
            self._put(node_id, Retained(until_s, 1.0 / seconds))

    def rate(self, node_id: int) -> float:
        """Uses a second that are expected besides the others."""
        known = self._retained.get(node_id)
        return 0.0 if known is None else known.rate

    def advance(self, now_s: float) -> list[int]:
        """Nodes whose time is over."""
        over = []
        while self._due and self._due[0][0] <= now_s:
            until_s, node_id = heapq.heappop(self._due)
            known = self._retained.get(node_id)
            if known is not None and known.until_s == until_s:
                del self._retained[node_id]
                over.append(node_id)
        return over

    def split(self, upper_id: int, lower_id: int) -> None:
        """``upper`` was split off ``lower``, and is retained as long."""
        if lower_id in self._retained:
            self._put(upper_id, self._retained[lower_id])

    def remove(self, node_id: int) -> None:
        """The node is gone."""
        self._retained.pop(node_id, None)

    def clear(self) -> None:
        """Every node is gone."""
        self._retained.clear()
        self._due.clear()

    def _put(self, node_id: int, retained: Retained) -> None:
        self._retained[node_id] = retained
        heapq.heappush(self._due, (retained.until_s, node_id))
        if len(self._due) > 2 * len(self._retained) + LEAST_DUE:  # most are of times that were extended since
            self._due = [(each.until_s, each_id) for each_id, each in self._retained.items()]
            heapq.heapify(self._due)
