"""KV events: routers are told on which tiers the blocks of each node are, as SGLang tells them of its own tiers.

A block is stored on every tier that has its node, in whatever form. What has changed is told when SGLang takes the
events: what is gone first, the ends of paths before what is above them, then what is new, parents before children.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.tree.changes import NodeChanges
from sglang_evicpress.patches.tree.node import path_to, start_of, steps_of, tokens_to
from sglang_evicpress.patches.tree.types import Node


class EventTree(Protocol):
    """The tree, and SGLang's queue of events in it."""

    nodes: Mapping[int, Node]
    root_node: Node
    page_size: int


class Told(NamedTuple):
    """A node as it was told of: its first position, and the tiers that have it."""

    start: int
    tiers: frozenset[Tier]


NOTHING = Told(0, frozenset())


@dataclass(eq=False, repr=False)
class KvEvents:
    """Remembers what was told of each node, and which have changed since. Shadows are nobody's prefix: never told."""

    tree: EventTree

    def __post_init__(self) -> None:
        self._told: dict[int, Told] = {}
        self._changed: dict[int, Node] = {}
        self._namespaces: dict[Hashable, set[str | None]] = {}  # by the first page of a path, as events name it

    def follow(self, changes: NodeChanges) -> None:
        """From now on whatever changes is told."""
        changes.changed.subscribe(self._note)
        changes.deleted.subscribe(self._note)
        changes.split.subscribe(self._split)
        changes.flushed.subscribe(self._clear)

    def tell(self) -> None:
        """Put what has changed into SGLang's queue."""
        changed, self._changed = self._changed, {}
        gone: list[tuple[int, Node, Tier]] = []
        new: list[tuple[int, Node, Tier]] = []
        for node in changed.values():
            before, now = self._told.pop(node.id, NOTHING), self._tiers_of(node)
            start = before.start if before.tiers else start_of(node)
            gone += [(start, node, tier) for tier in before.tiers - now]
            new += [(start, node, tier) for tier in now - before.tiers]
            if now:
                self._told[node.id] = Told(start, now)
            if start == 0:
                self._note_top(node, is_there=bool(now))
        for start, node, tier in sorted(gone, key=lambda each: -each[0]):
            RELEASE.tell_removed(self.tree, node, tier)
            new += [(self._told[each.id].start, each, tier) for each in self._named_alike(node, start, tier)]
        for _, node, tier in sorted(new, key=lambda each: (each[0], each[2])):
            RELEASE.tell_stored(self.tree, node, tier)

    def _tiers_of(self, node: Node) -> frozenset[Tier]:
        if node.id not in self.tree.nodes:
            return frozenset()
        return frozenset(node.kv.copies if node.value is None else (Tier.GPU, *node.kv.copies))

    def _note(self, node: Node) -> None:
        if not node.kv.is_shadow:
            self._changed[node.id] = node

    def _split(self, upper: Node, lower: Node) -> None:
        told = self._told.get(lower.id)
        if told is not None:
            self._told[upper.id] = told
            self._told[lower.id] = told._replace(start=told.start + len(upper.key))

    def _clear(self) -> None:
        self._told.clear()
        self._changed.clear()
        self._namespaces.clear()

    # ---- namespaces whose blocks have equal names

    def _page_of(self, node: Node) -> Hashable:
        page = tuple(node.key.raw_token_ids()[: self.tree.page_size])
        return RELEASE.event_salt(node.key.extra_key), page

    def _note_top(self, node: Node, *, is_there: bool) -> None:
        page = self._page_of(node)
        if is_there:
            self._namespaces.setdefault(page, set()).add(node.key.extra_key)
        elif (namespaces := self._namespaces.get(page)) is not None:
            namespaces.discard(node.key.extra_key)
            if not namespaces:
                del self._namespaces[page]

    def _named_alike(self, node: Node, start: int, tier: Tier) -> Iterator[Node]:
        """Nodes of other namespaces that the tier has, some of whose blocks are named as some of a node that went:
        SGLang does not tell extra keys apart."""
        namespaces = self._namespaces.get(self._page_of(path_to(node)[0]), set())
        others = sorted(each or "" for each in namespaces - {node.key.extra_key})
        for other in others:
            tokens, begin = tokens_to(node), 0
            key = type(node.key)(tokens, other or None)
            for each, matched in steps_of(self.tree.root_node, key, self.tree.page_size):
                begin += matched
                if begin > start and tier in self._told.get(each.id, NOTHING).tiers:
                    yield each
