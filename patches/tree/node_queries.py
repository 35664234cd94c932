"""Prompt queries that are kept for nodes: the nodes of each window, and windows that had to make room."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_evicpress.patches.tree.changes import Listener
from sglang_evicpress.patches.tree.types import Node


class NodeQueries:
    """Keeps ``node.kv.window``. Pieces of a split node share a window; ``on_changed`` is told of each node that loses
    its own for want of room."""

    def __init__(self, on_changed: Listener) -> None:
        self._on_changed = on_changed
        self._owners: dict[int, dict[int, Node]] = {}  # by key of the window and id of the node

    def keep(self, node: Node, key: int | None, lost: Iterable[int]) -> None:
        """The node's queries are kept under ``key``; those of the ``lost`` keys had to make room."""
        node.kv.window = key
        if key is not None:
            self._owners[key] = {node.id: node}
        for other in lost:
            for owner in list(self._owners.get(other, {}).values()):
                self.drop(owner)
                self._on_changed(owner)

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``."""
        if lower.kv.window is not None:
            self._owners[lower.kv.window][upper.id] = upper

    def drop(self, node: Node) -> None:
        """The node's queries are of no more use."""
        key, node.kv.window = node.kv.window, None
        if key is not None:
            owners = self._owners[key]
            del owners[node.id]
            if not owners:
                del self._owners[key]

    def clear(self) -> None:
        """The tree is gone."""
        self._owners.clear()
