"""Nodes of the tree by the profiled contexts that they spell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from sglang_evicpress.patches.tree.types import Node

MAX_NODE_PROFILES = 16  # a node that many contexts share goes by its newest


class ProfiledNodes:
    """What ``node.kv.profiles`` say, the other way round: a profile's nodes are found without a walk."""

    def __init__(self) -> None:
        self._nodes: defaultdict[bytes, dict[int, Node]] = defaultdict(dict)

    def __iter__(self) -> Iterator[bytes]:
        """Contexts that have nodes, the longest known first."""
        return iter(self._nodes)

    def of(self, key: bytes) -> dict[int, Node]:
        """Nodes, by id, of a context."""
        return dict(self._nodes.get(key, {}))

    def add(self, node: Node, key: bytes, num_tokens: int) -> None:
        """A context of ``num_tokens`` ends in the node or below it; it is the node's newest."""
        known = node.kv.profiles
        known.pop(key, None)
        known[key] = num_tokens
        self._nodes[key][node.id] = node
        while len(known) > MAX_NODE_PROFILES:
            self._remove(node, next(iter(known)))

    def split(self, upper: Node, lower: Node, end: int) -> None:
        """``upper``, which ends at ``end``, was split off ``lower``: what ends in it is not the lower one's."""
        upper.kv.profiles = dict(lower.kv.profiles)
        for key, num_tokens in upper.kv.profiles.items():
            self._nodes[key][upper.id] = upper
            if num_tokens <= end:
                self._remove(lower, key)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        for key in list(node.kv.profiles):
            self._remove(node, key)

    def clear(self) -> None:
        """Every node is gone, or all of their profiles are."""
        self._nodes.clear()

    def _remove(self, node: Node, key: bytes) -> None:
        del node.kv.profiles[key]
        nodes = self._nodes[key]
        del nodes[node.id]
        if not nodes:
            del self._nodes[key]
