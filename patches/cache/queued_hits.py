"""Waiting requests as evidence: the nodes they will hit carry the hit while they wait, before they run.

A claim is taken back when its request leaves the queue without running; once it runs, nodes of its real prefix that
were not claimed get the hit, and claimed ones that it does not use lose it (a match may end inside a node, or the tree
may have changed). Both pieces of a split node carry its claims, as they carry its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.reuse import Restate

MAX_NODES = 256
"""Nodes, from the root, that a waiting request claims at most."""

Hit = Callable[[Node, float, int], None]
"""Add this to a node's weight and to its number of hits."""


class Claim:
    """``value`` is what the hit was worth at ``made_s``, when the request came; ``nodes`` carry it, by id."""

    __slots__ = ("made_s", "nodes", "number", "req", "value")

    def __init__(self, number: int, req: object, value: float, made_s: float) -> None:
        self.made_s = made_s
        self.number = number
        self.req = req
        self.value = value
        self.nodes: dict[int, Node] = {}


class Claims:
    """One claim per waiting request, empty or not. Nothing here depends on anything a rank has for itself."""

    def __init__(self, hit: Hit) -> None:
        self._hit = hit
        self._claims: dict[int, Claim] = {}  # by id() of the request, which the claim keeps alive
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def num_nodes(self) -> int:
        return sum(len(claim.nodes) for claim in self._claims.values())

    def make(self, req: object, path: list[Node], value: float, now_s: float) -> None:
        """A request enters the queue and is expected to use ``path``."""
        self.release(req)
        self._num_made += 1
        claim = self._claims[id(req)] = Claim(self._num_made, req, value, now_s)
        for node in path[:MAX_NODES]:
            self._carry(claim, node)
            self._hit(node, value, 1)

    def settle(self, req: object, path: list[Node], value: float) -> bool:
        """The request runs, on ``path``: every node of it gets the hit once, and no other keeps it. Returns whether
        any of it had been claimed."""
        claim = self._claims.pop(id(req), None)
        claimed = {} if claim is None else claim.nodes
        for node in path:
            if node.id not in claimed:
                self._hit(node, value, 1)
        if claim is not None:
            used = {node.id for node in path}
            for node in claimed.values():
                del node.kv.claims[claim.number]
                if node.id not in used:
                    self._hit(node, -claim.value, -1)
        return bool(claimed)

    def release(self, req: object) -> None:
        """The request will not run: its hits are taken back."""
        self.settle(req, [], 0.0)

    def keep_only(self, waiting: Collection[object]) -> None:
        """Release every claim whose request is not among the waiting ones. Free while none has left."""
        if len(self._claims) > len(waiting):
            ids = {id(req) for req in waiting}
            for claim in [claim for key, claim in self._claims.items() if key not in ids]:
                self.release(claim.req)

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``, with its weight and hits."""
        upper.kv.claims = {}
        for claim in lower.kv.claims.values():
            self._carry(claim, upper)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        for claim in node.kv.claims.values():
            del claim.nodes[node.id]
        node.kv.claims = {}

    def restate(self, restate: Restate) -> None:
        """The clock has another epoch or half-life."""
        for claim in self._claims.values():
            claim.value = restate(claim.value, claim.made_s)

    def clear(self) -> None:
        """Every node is gone; the requests still wait."""
        for claim in self._claims.values():
            claim.nodes = {}

    def _carry(self, claim: Claim, node: Node) -> None:
        claim.nodes[node.id] = node
        node.kv.claims[claim.number] = claim
