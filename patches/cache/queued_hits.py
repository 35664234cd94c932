"""Waiting requests as evidence: the nodes they will hit carry the hit while they wait, before they run.

A queued hit is taken back when its request leaves the queue without running; once it runs, nodes of its real prefix
that were not queued get the hit, and queued ones that it does not use lose it (a match may end inside a node, or the
tree may have changed). Both pieces of a split node carry its queued hits, as they carry its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.reuse import Restate

MAX_NODES = 256
"""Nodes, from the root, that a waiting request marks at most."""

Hit = Callable[[Node, float, int], None]
"""Add this to a node's weight and to its number of hits."""


class QueuedHit:
    """``value`` is what the hit was worth at ``made_s``, when the request came; ``nodes`` carry it, by id."""

    __slots__ = ("made_s", "nodes", "number", "req", "value")

    def __init__(self, number: int, req: object, value: float, made_s: float) -> None:
        self.made_s = made_s
        self.number = number
        self.req = req
        self.value = value
        self.nodes: dict[int, Node] = {}


class QueuedHits:
    """One queued hit per waiting request, empty or not. Nothing here depends on anything a rank has for itself."""

    def __init__(self, hit: Hit) -> None:
        self._hit = hit
        self._hits_by_request: dict[int, QueuedHit] = {}  # by id() of the request, which the queued hit keeps alive
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._hits_by_request)

    @property
    def num_nodes(self) -> int:
        return sum(len(queued_hit.nodes) for queued_hit in self._hits_by_request.values())

    def make(self, req: object, path: list[Node], value: float, now_s: float) -> None:
        """A request enters the queue and is expected to use ``path``."""
        self.release(req)
        self._num_made += 1
        queued_hit = self._hits_by_request[id(req)] = QueuedHit(self._num_made, req, value, now_s)
        for node in path[:MAX_NODES]:
            self._carry(queued_hit, node)
            self._hit(node, value, 1)

    def resolve(self, req: object, path: list[Node], value: float) -> bool:
        """The request runs, on ``path``: every node of it gets the hit once, and no other keeps it. Returns whether
        any of it had been queued."""
        queued_hit = self._hits_by_request.pop(id(req), None)
        queued = {} if queued_hit is None else queued_hit.nodes
        for node in path:
            if node.id not in queued:
                self._hit(node, value, 1)
        if queued_hit is not None:
            used = {node.id for node in path}
            for node in queued.values():
                del node.kv.queued_hits[queued_hit.number]
                if node.id not in used:
                    self._hit(node, -queued_hit.value, -1)
        return bool(queued)

    def release(self, req: object) -> None:
        """The request will not run: its hits are taken back."""
        self.resolve(req, [], 0.0)

    def keep_only(self, waiting: Collection[object]) -> None:
        """Release every queued hit whose request is not among the waiting ones. Free while none has left."""
        if len(self._hits_by_request) > len(waiting):
            ids = {id(req) for req in waiting}
            for queued_hit in [queued_hit for key, queued_hit in self._hits_by_request.items() if key not in ids]:
                self.release(queued_hit.req)

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``, with its weight and hits."""
        upper.kv.queued_hits = {}
        for queued_hit in lower.kv.queued_hits.values():
            self._carry(queued_hit, upper)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        for queued_hit in node.kv.queued_hits.values():
            del queued_hit.nodes[node.id]
        node.kv.queued_hits = {}

    def restate(self, restate: Restate) -> None:
        """The clock has another epoch or half-life."""
        for queued_hit in self._hits_by_request.values():
            queued_hit.value = restate(queued_hit.value, queued_hit.made_s)

    def clear(self) -> None:
        """Every node is gone; the requests still wait."""
        for queued_hit in self._hits_by_request.values():
            queued_hit.nodes = {}

    def _carry(self, queued_hit: QueuedHit, node: Node) -> None:
        queued_hit.nodes[node.id] = node
        node.kv.queued_hits[queued_hit.number] = queued_hit
