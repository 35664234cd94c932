"""Hashes of the paths that end with nodes, remembered: whatever is copied hashes the whole of its path."""

from __future__ import annotations

from collections import OrderedDict

from sglang_evicpress.patches.tree.adapters import SsdScope
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.identity import PathHash

MOST_REMEMBERED = 4096


class PathHashes:
    """By the node that ends a path, which keeps its id when it is split: all tokens to its end stay the same."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[SsdScope, PathHash]] = OrderedDict()

    def of(self, node: Node, scope: SsdScope) -> PathHash:
        """Hash of the tokens from the root to the end of ``node``, to be copied before it is updated."""
        below, hashed = list[Node](), PathHash(*scope)
        while node.parent is not None:
            known = self._known.get(node.id)
            if known is not None and known[0] == scope:
                self._known.move_to_end(node.id)
                hashed = known[1]
                break
            below.append(node)
            node = node.parent
        for one in reversed(below):
            hashed = hashed.copy()
            hashed.update(one.key.raw_token_ids())
            self._known[one.id] = scope, hashed
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)
        return hashed

    def clear(self) -> None:
        """The tree is gone."""
        self._known.clear()
