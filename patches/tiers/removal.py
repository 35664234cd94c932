"""Nodes that go, from the GPU or altogether, and copies that are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import Changes, Copies, Slots, Tiers
from sglang_evicpress.patches.tree.node import has_child_on_gpu, iter_nodes, num_slots, slots_of, start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.survivors import SurvivorLayout


class Leaves(Protocol):
    """The tree itself."""

    @property
    def root(self) -> Node:
        """Another one after a flush."""

    def delete(self, node: Node, /) -> None:
        """Take a leaf out of the tree."""

    def tell_removed(self, node: Node, /) -> None:
        """Tell whoever follows the cache that the GPU has the node no more."""

    def remove(self, node_id: int, /) -> None:
        """Let no plan be about the node any more."""


class Removal:
    """Frees what nodes hold. ``on_drop`` is told of a node, the cause and the decision's number before it goes."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        leaves: Leaves,
        storage: Tiers,
        placement: Copies,
        ledger: Slots,
        changes: Changes,
        on_drop: Callable[[Node, str, int | None], None],
    ) -> None:
        self._nodes = nodes
        self._leaves = leaves
        self._storage = storage
        self._placement = placement
        self._ledger = ledger
        self._changes = changes
        self._on_drop = on_drop

    def drop(self, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        """Forget a childless, unlocked node, for ``cause``, by the decision of that number in the journal if any;
        returns the slots freed."""
        node = self._nodes[node_id]
        if node.lock_ref > 0 or node.children:
            raise RuntimeError(f"evicpress: node {node_id} is locked or has children and cannot be dropped")
        freed = num_slots(node)
        self._on_drop(node, cause, number)
        self._leaves.remove(node_id)  # what can fail comes first
        try:
            self._placement.remove_copies(node)
            if node.value is not None:
                if not node.kv.is_shadow:  # users' nodes of the same tokens would be taken for gone
                    self._leaves.tell_removed(node)
                self._ledger.free(slots_of(node))
        except Exception:
            if node.value is not None or node.kv.copies:
                self._changes.changed(node)
                raise
        self._leaves.delete(node)
        return freed

    def drop_tree(self, node: Node) -> None:
        """Forget a node and all below it in the tree; none of them may be locked."""
        for below in reversed([node, *iter_nodes(node)]):
            self.drop(below.id)

    def release(self, node_id: int, tier: Tier) -> int:
        """Free what a node holds above ``tier``, where it has a copy, and is as that is. Returns the slots freed."""
        node, placement = self._nodes[node_id], self._placement
        if node.lock_ref > 0 or tier not in node.kv.copies or tier <= tier_of(node):
            raise RuntimeError(f"evicpress: node {node_id} is locked or has no copy on tier {tier.label} below its own")
        freed, former, is_resident = num_slots(node), node.kv.layout, node.value is not None
        try:  # what can fail comes first
            for above in [above for above in node.kv.copies if above < tier]:
                placement.remove_copy(node, above)
            if is_resident:
                self.leave_gpu(node)
        except Exception:
            if node.value is None:
                placement.show(node)
            self._changes.changed(node)
            raise
        if not is_resident:
            placement.show(node)
            self._changes.changed(node)
        if former is not None and not _is_same_layout(former, node.kv.layout):
            self.drop_overlaps(node)
        self._storage.counts["released"] += 1
        return freed

    def leave_gpu(self, node: Node) -> None:
        freed = num_slots(node)
        self._ledger.free(slots_of(node))  # first: where it fails nothing has changed
        node.kv.version += 1
        node.value = None
        self._placement.note_left_gpu(node)
        self._placement.show(node)
        self._ledger.remove(freed)
        self._leaves.tell_removed(node)
        self._changes.changed(node)
        self._changes.left_gpu(node)

    def invalidate_copy(self, node: Node, tier: Tier, reason: str) -> None:
        """A copy cannot be read: a miss. What is below it is shown instead; a node that has nothing left goes, and all
        below it in the tree."""
        self._storage.errors[f"{tier.label}_{reason}"] += 1
        self._placement.remove_copy(node, tier)
        self.after_loss(node)

    def after_loss(self, node: Node) -> None:
        """A copy of the node was given up."""
        if node.value is None and not node.kv.copies:
            self.drop_tree(node)
            return
        if node.value is None:
            self._placement.show(node)
            self.drop_overlaps(node)
        self._changes.changed(node)

    def drop_overlaps(self, node: Node) -> None:
        """A node holds other KV than before: give up compressed copies below it that hold some of its positions too.

        The lower part of a node that was split after it was compressed holds, in some heads, survivors from above the
        split; behind the exact KV of these tokens they would be attended to twice.
        """
        begin = start_of(node)
        end = begin + len(node.key)
        for below in list(iter_nodes(node)):
            if below.id not in self._nodes:
                continue
            for tier, copy in list(below.kv.copies.items()):
                if copy.layout is not None and copy.layout.has_any(begin, end):
                    self._placement.remove_copy(below, tier)
                    self.after_loss(below)

    def flush_tier_copies(self, tier: Tier) -> None:
        """Forget every copy on a tier that nobody uses now; nodes that have one below stay."""
        for node in list(iter_nodes(self._leaves.root))[::-1]:
            if node.id not in self._nodes or node.lock_ref > 0:
                continue
            if tier == Tier.GPU:
                if node.value is None or has_child_on_gpu(node):
                    continue
                if not node.kv.copies:
                    self.drop_tree(node)
                else:
                    self.leave_gpu(node)
                    self.drop_overlaps(node)
            elif tier in node.kv.copies:
                self._placement.remove_copy(node, tier)
                self.after_loss(node)
        if tier == Tier.SSD and self._storage.ssd is not None:
            self._storage.ssd.clear(self._storage.workers["write"])


def _is_same_layout(left: SurvivorLayout, right: SurvivorLayout | None) -> bool:
    if right is None or left.num_slots != right.num_slots:
        return False
    return left is right or torch.equal(left.positions, right.positions)
