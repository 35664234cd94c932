"""Nodes that were moved or compressed by hand, or could not be had from the SSD: idle promotion keeps from them until a
request matches them or the time is over. Pressure still moves a held node down, or drops it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class Holds:
    """``nodes``: ids of those that there are."""

    def __init__(self, nodes: Collection[int], now_s: Callable[[], float]) -> None:
        self._nodes = nodes
        self._now_s = now_s
        self._until_s: dict[int, float] = {}  # by node id

    def hold(self, node_id: int, seconds: float) -> None:
        """Keep idle promotion from a node for so long; 0 ends a hold."""
        self._until_s[node_id] = self._now_s() + seconds

    def end(self, node_ids: Iterable[int]) -> None:
        """These nodes are used."""
        if self._until_s:
            for node_id in node_ids:
                self._until_s.pop(node_id, None)

    def left_s(self, node_id: int) -> float:
        """Seconds until idle promotion may promote a node; 0 without a hold."""
        return max(0.0, self._until_s.get(node_id, 0.0) - self._now_s())

    def split(self, upper_id: int, lower_id: int) -> None:
        """The upper part of a node that was split is held as long as the lower."""
        if lower_id in self._until_s:
            self._until_s[upper_id] = self._until_s[lower_id]

    def node_ids(self) -> frozenset[int]:
        """Nodes that are held now."""
        now = self._now_s()
        self._until_s = {each: until for each, until in self._until_s.items() if until > now and each in self._nodes}
        return frozenset(self._until_s)
