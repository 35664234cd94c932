"""Waiting requests as evidence: the nodes they will hit carry the hit while they wait, before they run.

A queued hit is taken back when its request leaves the queue without running; once it runs, nodes of its real prefix
that were not queued get the hit, and queued ones that it does not use lose it (a match may end inside a node, or the
tree may have changed). Both pieces of a split node carry its queued hits, as they carry its weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_evicpress.patches.tree.node import NodeKV
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.reuse import ReuseClock

MAX_NODES = 256
"""Nodes, from the root, that a waiting request marks at most."""


class ReuseTerms(Protocol):
    """Time, and the clock that says what a hit is worth."""

    now_s: float
    clock: ReuseClock

    def value_of_hit(self) -> float: ...
    def weigh(self, kv: NodeKV) -> float: ...


class WeightedNodes(Protocol):
    """Policy that goes by the weights of nodes."""

    def touch(self, node: Node) -> None: ...
    def reweigh(self) -> None: ...


@dataclass(slots=True, eq=False)
class QueuedHit:
    """``value`` is what the hit was worth at ``made_s``, when the request came; ``nodes`` carry it, by id."""

    number: int
    req: object
    value: float
    made_s: float
    nodes: dict[int, Node] = field(default_factory=dict)


class QueuedHits:
    """Hits of nodes: one queued hit per waiting request, empty or not, and those of requests that run. Nothing here
    depends on anything a rank has for itself."""

    def __init__(self, terms: ReuseTerms, policy: WeightedNodes) -> None:
        self._terms = terms
        self._policy = policy
        self._hits_by_request: dict[int, QueuedHit] = {}  # by id() of the request, which the queued hit keeps alive
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._hits_by_request)

    @property
    def num_nodes(self) -> int:
        return sum(len(queued_hit.nodes) for queued_hit in self._hits_by_request.values())

    def hit(self, node: Node, value: float, num_hits: int = 1) -> None:
        """Add this to a node's weight and to its number of hits."""
        kv = node.kv
        kv.weight = max(0.0, self._terms.weigh(kv) + value)
        kv.num_hits += num_hits
        if num_hits > 0:
            kv.last_use_s = self._terms.now_s
        self._policy.touch(node)

    def on_queued(self, req: object, steps: Sequence[tuple[Node, int]]) -> None:
        """A request enters the queue and is expected to use the nodes of ``steps``, with the tokens each matches."""
        path = [node for node, _ in steps]
        if path and path[-1].lock_ref == 0 and not path[-1].kv.queued_hits:
            # What runs or waits is held for that: such a gap says nothing of how long to remember the others.
            gap_s = self._terms.now_s - path[-1].kv.last_use_s
            self._terms.clock.observe_reuse(gap_s, sum(matched for _, matched in steps))
        self.release(req)
        self._num_made += 1
        value = self._terms.value_of_hit()
        queued_hit = self._hits_by_request[id(req)] = QueuedHit(self._num_made, req, value, self._terms.now_s)
        for node in path[:MAX_NODES]:
            self._carry(queued_hit, node)
            self.hit(node, value)

    def on_prefill(self, req: object, path: list[Node], num_tokens: int) -> None:
        """A request runs on ``path``, which holds ``num_tokens``: every node of it has its hit now, once."""
        gap_s = self._terms.now_s - path[-1].kv.last_use_s if path else 0.0
        was_queued = self._resolve(req, path, self._terms.value_of_hit())
        if path and not was_queued:
            self._terms.clock.observe_reuse(gap_s, num_tokens)

    def _resolve(self, req: object, path: list[Node], value: float) -> bool:
        """Every node of ``path`` gets the hit once, and no other keeps it. Returns whether any of it had been
        queued."""
        queued_hit = self._hits_by_request.pop(id(req), None)
        queued = {} if queued_hit is None else queued_hit.nodes
        for node in path:
            if node.id not in queued:
                self.hit(node, value)
        if queued_hit is not None:
            used = {node.id for node in path}
            for node in queued.values():
                del node.kv.queued_hits[queued_hit.number]
                if node.id not in used:
                    self.hit(node, -queued_hit.value, -1)
        return bool(queued)

    def release(self, req: object) -> None:
        """The request will not run: its hits are taken back."""
        self._resolve(req, [], 0.0)

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

    def follow_clock(self) -> None:
        """Let the clock take another epoch or half-life where it is due: weights are restated when they are looked at,
        and a sweep begins that looks at all."""
        clock = self._terms.clock
        if not clock.is_due(self._terms.now_s):
            return
        restate = clock.rebase(self._terms.now_s)
        for queued_hit in self._hits_by_request.values():
            queued_hit.value = restate(queued_hit.value, queued_hit.made_s)
        self._policy.reweigh()

    def clear(self) -> None:
        """Every node is gone; the requests still wait."""
        for queued_hit in self._hits_by_request.values():
            queued_hit.nodes = {}

    def _carry(self, queued_hit: QueuedHit, node: Node) -> None:
        queued_hit.nodes[node.id] = node
        node.kv.queued_hits[queued_hit.number] = queued_hit
