"""Nodes of which a move has failed: for a while plans make room of others, or of these by other moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from sglang_evicpress.patches.tree.changes import Listener
from sglang_evicpress.patches.tree.types import Node

ASIDE_S = 10.0
"""So long no plan is about a node of which a move has failed."""

WITHOUT_ROOM_S = 1.0
"""So long no plan gives a node a smaller copy of more bytes than there were for one, or any where it would keep more
tokens by it: it gets a smaller one still, moves as it is, or goes."""


def mark_failed(node: Node, is_marked: bool) -> None:
    """A node that is not planned with, and never compressed any more."""
    node.kv.is_aside = is_marked
    node.kv.has_failed = node.kv.has_failed or is_marked


def mark_without_room(node: Node, is_marked: bool) -> None:
    """A node whose ``room_bytes`` hold until it is marked no more."""
    if not is_marked:
        node.kv.room_bytes = None


class SetAside:
    """Marks these nodes, with when they are planned with again; ``on_changed`` is told of each that is marked or not
    any more."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        on_changed: Listener,
        *,
        seconds: float = ASIDE_S,
        mark: Callable[[Node, bool], None] = mark_failed,
    ) -> None:
        self._nodes = nodes
        self._on_changed = on_changed
        self._seconds = seconds
        self._mark = mark
        self._until_s: dict[int, float] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._until_s)

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, node_id: int, now_s: float) -> None:
        """A move of the node, which may be gone, has failed."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._until_s[node_id] = now_s + self._seconds
            self._mark(node, True)
            self._on_changed(node)

    def return_due(self, now_s: float) -> None:
        """Plan again with nodes that were set aside for long enough."""
        self._return([node_id for node_id, until_s in self._until_s.items() if now_s >= until_s])

    def return_all(self) -> bool:
        """Plan with every node again, now: nothing else has room to give. Returns whether there were any."""
        node_ids = list(self._until_s)
        self._return(node_ids)
        return bool(node_ids)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._until_s.pop(node.id, None)

    def clear(self) -> None:
        """The tree is gone."""
        self._until_s.clear()

    def _return(self, node_ids: Iterable[int]) -> None:
        for node_id in node_ids:
            del self._until_s[node_id]
            self._mark(self._nodes[node_id], False)
            self._on_changed(self._nodes[node_id])
