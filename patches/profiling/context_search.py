"""Search of the tree for the nodes of contexts that were profiled elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sglang_evicpress.patches.tree.node import path_to, start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.index import SMALL
from sglang_evicpress.quality.profile import Profile

LOOKED_PER_ROUND, HASHED_PER_ROUND = 128, 4  # nodes, and of these such as a context may end in


@dataclass(eq=False, repr=False)
class ContextSearch:
    """Looks for the end of the context that was added last, some ``nodes`` a round. ``spells``: whether the tokens to a
    node begin with a context; ``found`` is given the key of one and its path."""

    nodes: dict[int, Node]
    spells: Callable[[Node, Profile], bool]
    found: Callable[[bytes, Iterable[Node]], None]
    _sought: list[tuple[Profile, list[int]]] = field(default_factory=list)  # with the ids of nodes to look at

    def add(self, profile: Profile) -> None:
        """Look for its context from now on; where nodes are few, all of them are looked at before this returns."""
        num_nodes = len(self.nodes)
        self._sought.append((profile, list(reversed(self.nodes))))
        if num_nodes <= SMALL:
            self._look(num_nodes, num_nodes)

    def clear(self) -> None:
        """Nothing is sought any more."""
        self._sought.clear()

    def advance(self) -> bool:
        """Look at the next nodes; called once a round. True: a context was found."""
        return bool(self._sought) and self._look(LOOKED_PER_ROUND, HASHED_PER_ROUND)

    def _look(self, num_looked: int, num_hashed: int) -> bool:
        profile, left = self._sought[-1]
        end = profile.num_tokens
        is_found = False
        for _ in range(min(num_looked, len(left))):
            node = self.nodes.get(left.pop())
            if node is None or node.kv.is_shadow or not node.kv.is_text:
                continue
            if not start_of(node) < end <= start_of(node) + len(node.key):
                continue
            if self.spells(node, profile):
                self.found(profile.key, path_to(node))
                left.clear()
                is_found = True
                break
            num_hashed -= 1
            if num_hashed <= 0:
                break
        if not left:
            self._sought.pop()
        return is_found
