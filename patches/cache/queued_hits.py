"""Uses of nodes, by requests that run and by those that wait: what each node weighs.

A waiting request's nodes count as used while it waits, before it runs. Such a queued hit is taken back when its request
leaves the queue without running; once it runs, nodes of its real prefix that were not queued get the hit, and queued
ones that it does not use lose it (a match may end inside a node, or the tree may have changed). Both pieces of a split
node carry its queued hits, as they carry its uses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.retention import Retention
from sglang_evicpress.policy.reuse_tracker import ReuseTracker

MAX_NODES = 256
"""Nodes, from the root, that a waiting request marks at most."""

QUEUED_RATE = 1.0
"""Uses per second that a waiting request is: it is sure to come, within about a second."""

GROWN_PER_ROUND = 16
"""Nodes that grow older in a round, of some 15 us each. Where more would, each does so as often as its turn comes."""

GROWN_BESIDE = 4
"""The same in a round in which the rates of reuse are learned anew, which takes as long as many nodes do."""

WORTH_TELLING = 0.05
"""Share by which a weight has to change with age before the policy is told."""


class LogicalTime(Protocol):
    """Time, equal on every rank, and the reuse of nodes until then."""

    now_s: float
    reuse: ReuseTracker


class WeightedNodes(Protocol):
    """Policy that goes by the weights of nodes."""

    def touch(self, node: Node) -> None: ...


@dataclass(slots=True, eq=False)
class QueuedHit:
    """``nodes`` carry it, by id."""

    number: int
    req: object
    nodes: dict[int, Node] = field(default_factory=dict)


class QueuedHits:
    """Hits of nodes: one queued hit per waiting request, empty or not, and those of requests that run. Nothing here
    depends on anything a rank has for itself."""

    def __init__(self, nodes: Mapping[int, Node], terms: LogicalTime, policy: WeightedNodes) -> None:
        self._nodes = nodes
        self._terms = terms
        self._reuse = terms.reuse
        self._policy = policy
        self._retention = Retention()
        self._hits_by_request: dict[int, QueuedHit] = {}  # by id() of the request, which the queued hit keeps alive
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._hits_by_request)

    @property
    def num_nodes(self) -> int:
        return sum(len(queued_hit.nodes) for queued_hit in self._hits_by_request.values())

    # ---- nodes

    def add(self, node: Node, num_siblings: int) -> None:
        """A new node, its parent's child number ``num_siblings``; 0: it is below the root."""
        is_users = not node.kv.is_shadow
        self._reuse.add(node.id, self._terms.now_s, len(node.key), num_siblings, counts=is_users)
        node.kv.weight = self._weight_of(node)

    def use(self, node: Node) -> None:
        """A request uses the node that was not queued for it."""
        self._reuse.use(node.id, self._terms.now_s)
        self._hit(node, 1)

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``, with its weight and hits."""
        self._reuse.split(upper.id, lower.id)
        self._retention.split(upper.id, lower.id)
        upper.kv.queued_hits = {}
        for queued_hit in lower.kv.queued_hits.values():
            self._carry(queued_hit, upper)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._reuse.remove(node.id)
        self._retention.remove(node.id)
        for queued_hit in node.kv.queued_hits.values():
            del queued_hit.nodes[node.id]
        node.kv.queued_hits = {}

    def clear(self) -> None:
        """Every node is gone; the requests still wait."""
        self._reuse.clear()
        self._retention.clear()
        for queued_hit in self._hits_by_request.values():
            queued_hit.nodes = {}

    def grow_older(self) -> None:
        """Nodes that nobody has used for some time weigh something else now."""
        for node_id in self._reuse.advance(self._terms.now_s, GROWN_PER_ROUND, GROWN_BESIDE):
            node = self._nodes[node_id]
            if not math.isclose(self._weight_of(node), node.kv.weight, rel_tol=WORTH_TELLING):
                self._reweigh(node)
        for node_id in self._retention.advance(self._terms.now_s):
            self._reweigh(self._nodes[node_id])

    def retain(self, path: Sequence[Node], seconds: float) -> None:
        """A request asks for the nodes of its path to be kept for so long, if that is worth it."""
        for node in path[:MAX_NODES]:
            self._retention.hold(node.id, self._terms.now_s, seconds)
            self._reweigh(node)

    @property
    def num_retained(self) -> int:
        """Nodes that requests asked to retain."""
        return len(self._retention)

    # ---- requests

    def on_queued(self, req: object, steps: Sequence[tuple[Node, int]]) -> None:
        """A request enters the queue and is expected to use the nodes of ``steps``, with the tokens each matches."""
        path = [node for node, _ in steps]
        if path and path[-1].lock_ref == 0 and not path[-1].kv.queued_hits:
            # What runs or waits is held for that: such a gap says nothing of the others.
            self._reuse.observe_request(path[-1].id, self._terms.now_s)
        self.release(req)
        self._num_made += 1
        queued_hit = self._hits_by_request[id(req)] = QueuedHit(self._num_made, req)
        for node in path[:MAX_NODES]:
            self._carry(queued_hit, node)
            self._hit(node, 1)

    def on_prefill(self, req: object, path: list[Node], num_tokens: int) -> None:
        """A request runs on ``path``, which holds ``num_tokens``: every node of it has its hit now, once."""
        queued_hit = self._hits_by_request.pop(id(req), None)
        if path and (queued_hit is None or not queued_hit.nodes):
            self._reuse.observe_request(path[-1].id, self._terms.now_s)
        queued = {} if queued_hit is None else queued_hit.nodes
        if queued_hit is not None:
            self._take_back(queued_hit, {node.id for node in path})
        for node in path:
            self._reuse.use(node.id, self._terms.now_s)
            self._hit(node, 0 if node.id in queued else 1)

    def release(self, req: object) -> None:
        """The request will not run: its hits are taken back."""
        queued_hit = self._hits_by_request.pop(id(req), None)
        if queued_hit is not None:
            self._take_back(queued_hit, ())

    def keep_only(self, waiting: Collection[object]) -> None:
        """Release every queued hit whose request is not among the waiting ones. Free while none has left."""
        if len(self._hits_by_request) > len(waiting):
            ids = {id(req) for req in waiting}
            for queued_hit in [queued_hit for key, queued_hit in self._hits_by_request.items() if key not in ids]:
                self.release(queued_hit.req)

    def _take_back(self, queued_hit: QueuedHit, used: Collection[int]) -> None:
        """Nobody carries it any more; what is not ``used`` was not hit by it either."""
        for node in queued_hit.nodes.values():
            del node.kv.queued_hits[queued_hit.number]
            if node.id not in used:
                self._hit(node, -1)

    def _carry(self, queued_hit: QueuedHit, node: Node) -> None:
        queued_hit.nodes[node.id] = node
        node.kv.queued_hits[queued_hit.number] = queued_hit

    def _hit(self, node: Node, num_hits: int) -> None:
        node.kv.num_hits += num_hits
        self._reweigh(node)

    def _reweigh(self, node: Node) -> None:
        node.kv.weight = self._weight_of(node)
        self._policy.touch(node)

    def _weight_of(self, node: Node) -> float:
        queued = QUEUED_RATE * len(node.kv.queued_hits)
        return self._reuse.rate(node.id) + queued + self._retention.rate(node.id)
