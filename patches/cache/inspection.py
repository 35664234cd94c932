"""Looking into the cache and checking it: what ``/evicpress/*`` answers, as plain JSON objects."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from sglang_evicpress.controller.journal import Journal
from sglang_evicpress.core import Decision, Form, Option, Tier
from sglang_evicpress.introspect.arguments import (
    PAGE_DECISIONS,
    PAGE_NODES,
    PAGE_NUMBERS,
    PAGE_OUTLINE,
    IntrospectionError,
)
from sglang_evicpress.introspect.keyed_hash import keyed_hash
from sglang_evicpress.introspect.operations import NodeBusy, UnknownNode
from sglang_evicpress.patches.cache.integrity import CheckedTree, PolicyInUse
from sglang_evicpress.patches.cache.statistics import TermFigures, described_cost
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import GpuForms, NodeHolds
from sglang_evicpress.patches.tree.node import is_lossy, num_slots, size_of, start_of
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.survivors import SurvivorLayout

MAX_CHILDREN = 256  # named in a node's description
MAX_NAMESPACES = 1024  # whose hashes are kept

OUTLINE_COLUMNS = ("id", "parent_id", "num_tokens", "num_slots", "tier", "form", "num_hits", "is_locked")
_LABELS = {tier: tier.label for tier in Tier}


@dataclass(eq=False, repr=False)
class TreeInspection:
    """Answers to questions about the tree; ``key`` is what namespaces and tokens are hashed with. Changes only through
    ``execute``, which has a decision carried out, and ``free_slots``."""

    tree: CheckedTree
    operations: GpuForms
    options_of: Callable[[Node], tuple[Option, ...]]
    execute: Callable[[Decision], int]
    allocator: Allocator
    free_slots: Callable[[int], int]
    holds: NodeHolds
    policy: PolicyInUse
    terms: TermFigures
    journal: Journal
    key: bytes

    def __post_init__(self) -> None:
        self._shown_namespaces: dict[str, str] = {}
        self._outlined: list[int] = []  # ids, as they were when an outline was begun

    def describe_tree(self, after: int = 0, limit: int = PAGE_NODES) -> dict[str, object]:
        ids = list(self.tree.nodes)  # in ascending order: ids are never reused
        begin = bisect_right(ids, after)
        page = ids[begin : begin + min(limit, PAGE_NODES)]
        starts: dict[int, int] = {self.tree.root_node.id: 0}
        by_start = sorted((_start_of(self.tree.nodes[node_id], starts), node_id) for node_id in page)
        nodes = [self._summary(self.tree.nodes[node_id], start) for start, node_id in by_start]  # parents first
        return {
            "page_size": self.tree.page_size,
            "num_nodes": len(ids),
            "nodes": nodes,
            "next": page[-1] if page and page[-1] != ids[-1] else None,
        }

    def describe_outline(self, after: int = 0, limit: int = PAGE_OUTLINE) -> dict[str, object]:
        nodes, ids = self.tree.nodes, self._outlined
        if not after or not ids or after >= ids[-1]:
            ids = self._outlined = list(nodes)  # whoever comes later is behind: ids are never reused
        begin = bisect_right(ids, after)
        page = ids[begin : begin + min(limit, PAGE_OUTLINE)]
        root, forms = self.tree.root_node, dict[Form, str]()
        rows = []
        for node in filter(None, map(nodes.get, page)):
            form = node.kv.form
            text = forms.get(form) or forms.setdefault(form, str(form))
            parent = None if node.parent is root else node.parent.id
            sizes = len(node.key), size_of(node)
            rows.append((node.id, parent, *sizes, _LABELS[tier_of(node)], text, node.kv.num_hits, node.lock_ref > 0))
        return {
            "columns": OUTLINE_COLUMNS,
            "num_nodes": len(nodes),
            "nodes": rows,
            "next": page[-1] if page and page[-1] < next(reversed(nodes), 0) else None,
        }

    def describe_node(
        self, node_id: int, *, positions: bool = False, tokens: bool = False, layer: int | None = None
    ) -> dict[str, object]:
        node = self._node(node_id)
        layout = node.kv.layout
        tokens_of_node = node.key.raw_token_ids()
        described = self._summary(node, start_of(node))
        described["tokens_hash"] = keyed_hash(tokens_of_node.tobytes(), self.key, 32)
        described["options"] = [
            {"form": str(option.form or "drop"), "num_slots": option.num_bytes // self.policy.menu.slot_bytes}
            for option in self.options_of(node)
        ]
        counts = None if layout is None else [layout.count_of(layer) for layer in range(layout.shape[0])]
        described["layer_slots"] = counts
        described["hold_seconds_left"] = self.holds.left_s(node_id)
        described["decisions"] = self.journal.about(node_id)
        if positions:
            described["positions"] = None if layout is None else _numbers_of(layout, node_id, layer)
            described["logical_indices"] = None if layout is None else layout.logical.numpy()
        if tokens:
            described["token_ids"] = np.frombuffer(tokens_of_node, dtype=np.int64)
        return described

    def explain_node(self, node_id: int) -> dict[str, object]:
        node = self._node(node_id)
        return {
            **self.policy.planner.explain(node_id, self.terms.value_of_hit()),
            "num_hits": node.kv.num_hits,
            "weight_horizon_s": self.terms.reuse.model.horizon_s,
            "costs": described_cost(self.terms.policy_costs.prefill),
            "recompute_weight": self.terms.recompute_weight,
            "read_weight": self.terms.read_weight,
            "decisions": self.journal.about(node_id),
        }

    def read_journal(self, since: int, limit: int) -> dict[str, object]:
        return {"now_s": self.terms.now_s, **self.journal.read(since, min(limit, PAGE_DECISIONS))}

    def compress_node(self, node_id: int, form: Form, hold_s: float = 0.0) -> dict[str, object]:
        """See ``Inspectable.compress_node``."""
        node = self._node(node_id)
        if node.lock_ref > 0:
            raise NodeBusy(node_id)
        if node.kv.is_shadow:
            raise NodeBusy(node_id, "it belongs to a shadow")
        self.policy.menu.check_budget(form)
        form = replace(form, codec=node.kv.form.codec)  # what that has taken does not come back
        before, after = num_slots(node), self.operations.slots_in(node, form, start_of(node))
        if after is None:
            why = "its press needs queries of the prompt, and none were kept (they are when --kv-forms names the press)"
            if form.is_exact or not node.kv.form.is_exact:
                why = f"it holds {node.kv.form}: expected a smaller form of the same press"
            raise ValueError(f"node {node_id} cannot be brought to {form}: {why}")
        if after >= before:
            raise ValueError(
                f"node {node_id} cannot be brought to {form}: it holds {before} slots and would keep {after} "
                f"(whole pages of {self.tree.page_size})"
            )
        slot_bytes = self.policy.menu.slot_bytes
        source = Option(node.kv.form, Tier.GPU, before * slot_bytes)
        option = Option(form, Tier.GPU, after * slot_bytes)
        freed_bytes = source.num_bytes - option.num_bytes
        freed = self.execute(Decision(node_id, source, option, freed_bytes, node.kv.weight))
        if node_id not in self.tree.nodes:
            raise IntrospectionError(507, f"node {node_id} was dropped: the device has no memory to compress it")
        self.holds.hold(node_id, hold_s)
        hold = {"hold_seconds_left": self.holds.left_s(node_id)}
        return {**self._summary(node, start_of(node)), "freed_slots": freed, **hold}

    def evict_slots(self, num_slots: int) -> dict[str, object]:
        freed = self.free_slots(num_slots)
        return {"freed_slots": freed, "free_slots": self.allocator.available_size()}

    # ---- parts

    def _node(self, node_id: int) -> Node:
        node = self.tree.nodes.get(node_id)
        if node is None:
            raise UnknownNode(node_id)
        return node

    def _summary(self, node: Node, start: int) -> dict[str, object]:
        kv, extra_key = node.kv, node.key.extra_key  # a cache salt is a secret: only its hash is shown
        forms = {tier.label: str(copy.form) for tier, copy in sorted(kv.copies.items())}
        if kv.external is not None:
            forms[Tier.EXTERNAL.label] = str(kv.external.form)
        return {
            "id": node.id,
            "parent_id": None if node.parent is self.tree.root_node else node.parent.id,
            "children": [child.id for child in islice(node.children.values(), MAX_CHILDREN)],
            "num_children": len(node.children),
            "start": start,
            "num_tokens": len(node.key),
            "num_slots": num_slots(node),
            "form": str(kv.form),
            "is_shadow": kv.is_shadow,
            "num_profiles": len(kv.profiles),
            "tier": tier_of(node).label,
            "copies": forms,
            "origin": kv.origin,
            "lineage": "lossy" if is_lossy(node) else "exact",
            "computed_on": "lossy" if kv.is_lossy_prefix else "exact",
            "lock_ref": node.lock_ref,
            "weight": kv.weight / self.terms.value_of_hit(),
            "num_hits": kv.num_hits,
            "last_use": kv.last_use,
            "has_queries": self.operations.window_of(node) is not None,
            "namespace": None if extra_key is None else self._shown_namespace(extra_key),
        }

    def _shown_namespace(self, extra_key: str) -> str:
        """Worked out once for each of the last namespaces: clients choose them, and how long they are."""
        if extra_key not in self._shown_namespaces:
            while len(self._shown_namespaces) >= MAX_NAMESPACES:
                del self._shown_namespaces[next(iter(self._shown_namespaces))]
            self._shown_namespaces[extra_key] = keyed_hash(extra_key.encode("utf-8", "surrogatepass"), self.key, 8)
        return self._shown_namespaces[extra_key]


def _start_of(node: Node, starts: dict[int, int]) -> int:
    """Start of a node like ``start_of``, with known starts by id: every node above is passed once for a whole page."""
    path = []
    above = node.parent
    while above.id not in starts:
        path.append(above)
        above = above.parent
    for each in reversed(path):
        starts[each.id] = starts[each.parent.id] + (0 if each.parent.parent is None else len(each.parent.key))
    parent = node.parent
    return starts[parent.id] + (0 if parent.parent is None else len(parent.key))


def _numbers_of(layout: SurvivorLayout, node_id: int, layer: int | None) -> object:
    """Positions as nested arrays [layers, heads, slots], or [heads, slots] of one layer. Raises IntrospectionError 400
    for a layer that is not there, or more numbers than one call may ask for, before any is read. A slot that a layer
    does not fill has position -1."""
    num_layers, num_heads, num_slots = layout.shape
    if layer is not None and layer >= num_layers:
        raise IntrospectionError(400, f"layer is {layer}: expected 0 to {num_layers - 1}")
    count = num_heads * num_slots * (num_layers if layer is None else 1)
    if count > PAGE_NUMBERS:
        way_out = "ask without them" if layer is not None else f"ask for one layer, 0 to {num_layers - 1}, at a time"
        raise IntrospectionError(
            400, f"node {node_id} has {count} positions, and {PAGE_NUMBERS} are shown at once: {way_out}"
        )
    if layer is not None and layout.filling is None:
        return np.ascontiguousarray(layout.positions_of(layer).numpy())
    positions = layout.positions if layer is None else layout.positions[layer]
    return np.ascontiguousarray(positions.numpy())
