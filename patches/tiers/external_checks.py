"""Copies in the external store that plans count on, looked for again: the store may have lost what it had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_evicpress.patches.tiers.external_writes import Signals
from sglang_evicpress.patches.tiers.types import Names, Tiers
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.header import Header
from sglang_evicpress.tiers.external.entries import LEVELS
from sglang_evicpress.tiers.external.store import ExternalStore
from sglang_evicpress.tiers.jobs import Job

LOOKED_AGAIN_S = 60.0
"""After so long a copy is looked for again."""

EVERY_S = 0.1
"""One at a time, and no more often: each takes a few calls of the store."""


@dataclass(eq=False, repr=False)
class ExternalChecks:
    """Looks for each copy of a node now and then, and for all of them once the store was away. What is gone is
    forgotten, of which the node's change tells, and so it is published again. ``header_of``: of an entry of a node."""

    nodes: Mapping[int, Node]
    storage: Tiers
    names: Names
    header_of: Callable[[Node], Header]
    changes: Signals

    def __post_init__(self) -> None:
        self._seen_s: dict[int, float] = {}  # by node id, the one that was seen longest ago first
        self._is_under_way = self._was_away = False
        self._next_s = 0.0

    def note(self, node: Node) -> None:
        """The node is new, or what it holds has changed."""
        if node.kv.external is not None:
            self._seen_s.setdefault(node.id, self.storage.now_s())

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._seen_s.pop(node.id, None)

    def clear(self) -> None:
        """Every node is gone."""
        self._seen_s.clear()

    def advance(self) -> None:
        """Look for the copy that was seen longest ago, if that is due."""
        store, now_s = self.storage.external, self.storage.now_s()
        if store is None or not self._seen_s:
            return
        if not store.may_read:
            self._was_away = True
            return
        if self._was_away:
            self._was_away, self._seen_s = False, dict.fromkeys(self._seen_s, -math.inf)
        if self._is_under_way or now_s < self._next_s:
            return
        node_id, seen_s = next(iter(self._seen_s.items()))
        if now_s - seen_s < LOOKED_AGAIN_S:
            return
        del self._seen_s[node_id]
        self._next_s = now_s + EVERY_S
        node = self.nodes.get(node_id)
        if node is not None and node.kv.external is not None and self.names.may_reach_ssd(node):
            self._is_under_way = True
            level = LEVELS[0] if node.kv.external.is_exact else LEVELS[1]
            self.storage.submit("publish", ExternalCheck(self, store, node.id, self.header_of(node), level))

    def end_check(self, job: ExternalCheck) -> None:
        self._is_under_way = False
        node = self.nodes.get(job.node_id)
        if node is None or node.kv.external is None or job.store is not self.storage.external:
            return
        if job.is_there or job.error is not None:  # which says nothing of the copy
            self._seen_s[node.id] = self.storage.now_s()
            return
        self.storage.counts["external_gone"] += 1
        node.kv.external = None
        self.changes.changed(node)


class ExternalCheck(Job):
    """Looks whether the store has all tokens of a node at the level of its copy there."""

    def __init__(self, owner: ExternalChecks, store: ExternalStore, node_id: int, header: Header, level: str) -> None:
        super().__init__()
        self.owner, self.store, self.node_id, self.header, self.level = owner, store, node_id, header, level
        self.is_there = False

    def run(self) -> None:
        header = self.header
        page_bytes = 4 * header.shape.page_size
        self.is_there = self.store.entries.has_all(
            header.parent_key, header.tokens, header.start, page_bytes, self.level
        )

    def finish(self) -> None:
        self.owner.end_check(self)
