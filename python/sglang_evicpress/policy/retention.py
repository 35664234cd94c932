"""Nodes that requests asked to retain: a higher expected reuse, for a time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

MOST_NODES = 65_536
"""Retained at a time; what is asked for beyond that is not."""

MOST_OF_A_NODE = 4
"""Times for which one is retained, each at another rate; the longest are kept."""

LEAST_DUE = 1024
"""Times that are noted before those are forgotten that no longer hold."""


@dataclass(frozen=True, slots=True)
class Retained:
    """Until when, in logical seconds, a node counts as used ``rate`` times a second more."""

    until_s: float
    rate: float


class Retention:
    """One more use is expected of a node within the seconds that were asked for; of several, each lasts as long as it
    was asked for, and the highest rate counts. Pure: equal on every rank where what it is told is."""

    def __init__(self) -> None:
        self._retained: dict[int, tuple[Retained, ...]] = {}  # the first to end first, each at a lower rate
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._retained)

    def hold(self, node_id: int, now_s: float, seconds: float) -> None:
        """Retain a node for so long from now on."""
        known, asked = self._retained.get(node_id, ()), Retained(now_s + seconds, 1.0 / seconds)
        if not known and len(self._retained) >= MOST_NODES:
            return
        if any(each.until_s >= asked.until_s and each.rate >= asked.rate for each in known):
            return
        kept = [each for each in known if each.until_s > asked.until_s or each.rate > asked.rate]
        ordered = sorted([*kept, asked], key=lambda each: each.until_s)
        self._retained[node_id] = tuple(ordered[-MOST_OF_A_NODE:])
        self._note_due(asked.until_s, node_id)

    def rate(self, node_id: int) -> float:
        """Uses a second that are expected besides the others."""
        known = self._retained.get(node_id)
        return 0.0 if known is None else known[0].rate

    def advance(self, now_s: float) -> list[int]:
        """Nodes of which less is expected from now on."""
        over = []
        while self._due and self._due[0][0] <= now_s:
            _, node_id = heapq.heappop(self._due)
            known = self._retained.get(node_id, ())
            left = tuple(each for each in known if each.until_s > now_s)
            if len(left) < len(known):
                over.append(node_id)
                if left:
                    self._retained[node_id] = left
                else:
                    del self._retained[node_id]
        return over

    def split(self, upper_id: int, lower_id: int) -> None:
        """``upper`` was split off ``lower``, and is retained as long."""
        if lower_id in self._retained:
            self._retained[upper_id] = self._retained[lower_id]
            for each in self._retained[lower_id]:
                self._note_due(each.until_s, upper_id)

    def remove(self, node_id: int) -> None:
        """The node is gone."""
        self._retained.pop(node_id, None)

    def clear(self) -> None:
        """Every node is gone."""
        self._retained.clear()
        self._due.clear()

    def _note_due(self, until_s: float, node_id: int) -> None:
        heapq.heappush(self._due, (until_s, node_id))
        if len(self._due) > 2 * MOST_OF_A_NODE * len(self._retained) + LEAST_DUE:  # most do not hold any more
            self._due = [(each.until_s, one) for one, known in self._retained.items() for each in known]
            heapq.heapify(self._due)
