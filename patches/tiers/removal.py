"""Nodes that go, from the GPU or altogether, and copies that are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.placement import is_same_layout, tier_of
from sglang_evicpress.patches.tiers.types import Changes, Copies, Slots, Tiers
from sglang_evicpress.patches.tree.node import has_child_on_gpu, iter_nodes, num_slots, slots_of, start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.copies import HostEntry, SsdEntry


class Leaves(Protocol):
    """The tree itself."""

    @property
    def root(self) -> Node:
        """Another one after a flush."""

    def delete(self, node: Node, /) -> None: ...


@dataclass(eq=False, repr=False)
class Removal:
    """Frees what nodes hold. ``on_drop`` is told of a node, the cause and the decision's number before it goes,
    ``leave_plans`` lets no plan be about it any more."""

    nodes: Mapping[int, Node]
    leaves: Leaves
    storage: Tiers
    placement: Copies
    ledger: Slots
    changes: Changes
    on_drop: Callable[[Node, str, int | None], None]
    leave_plans: Callable[[int], None]

    def drop(self, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        """Forget a childless, unlocked node, for ``cause``, by the decision of that number in the journal if any;
        returns the slots freed."""
        node = self.nodes[node_id]
        if node.lock_ref > 0 or node.children:
            raise RuntimeError(f"evicpress: node {node_id} is locked or has children and cannot be dropped")
        freed = num_slots(node)
        self.on_drop(node, cause, number)
        self.leave_plans(node_id)  # what can fail comes first
        try:
            self.placement.remove_copies(node)
            if node.value is not None:
                self.ledger.free(slots_of(node))
        except Exception:
            if node.value is not None or node.kv.copies:
                self.changes.changed(node)
                raise
        self.leaves.delete(node)
        return freed

    def drop_tree(self, node: Node) -> None:
        """Forget a node and all below it in the tree; none of them may be locked."""
        for below in reversed([node, *iter_nodes(node)]):
            self.drop(below.id)

    def release(self, node_id: int, tier: Tier) -> int:
        """Free what a node holds above ``tier``, where it has a copy, and is as that is. Returns the slots freed."""
        node, placement = self.nodes[node_id], self.placement
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
            self.changes.changed(node)
            raise
        if not is_resident:
            placement.show(node)
            self.changes.changed(node)
        if former is not None and self.storage.ranks.any_of([not is_same_layout(former, node.kv.layout)])[0]:
            self.drop_overlaps(node)
        self.storage.counts["released"] += 1
        return freed

    def leave_gpu(self, node: Node) -> None:
        freed = num_slots(node)
        self.ledger.free(slots_of(node))  # first: where it fails nothing has changed
        node.kv.version += 1
        node.value = None
        self.placement.note_left_gpu(node)
        self.placement.show(node)
        self.ledger.remove(freed)
        self.changes.changed(node)
        self.changes.left_gpu(node)

    def invalidate_copy(self, node: Node, tier: Tier, reason: str) -> None:
        """A copy cannot be read: a miss. What is below it is shown instead; a node that has nothing left goes, and all
        below it in the tree."""
        self.storage.errors[f"{tier.label}_{reason}"] += 1
        self.placement.remove_copy(node, tier)
        self.after_loss(node)

    def invalidate_entry(self, entry: HostEntry | SsdEntry, tier: Tier, reason: str) -> None:
        """An entry cannot be read: no node that has a piece of it has that copy any more."""
        for node in [self.nodes.get(node_id) for node_id in sorted(entry.owners)]:
            if node is not None and node.id in self.nodes:
                self.invalidate_copy(node, tier, reason)

    def after_loss(self, node: Node) -> None:
        """A copy of the node was given up."""
        if node.value is None and not node.kv.copies:
            self.drop_tree(node)
            return
        if node.value is None:
            self.placement.show(node)
            self.drop_overlaps(node)
        self.changes.changed(node)

    def drop_overlaps(self, node: Node) -> None:
        """A node holds other KV than before: give up compressed copies below it that hold some of its positions too.

        The lower part of a node that was split after it was compressed holds, in some heads, survivors from above the
        split; behind the exact KV of these tokens they would be attended to twice.
        """
        begin = start_of(node)
        end = begin + len(node.key)
        pressed = [
            (below, tier, copy.layout)
            for below in iter_nodes(node)
            for tier, copy in below.kv.copies.items()
            if copy.layout is not None
        ]
        overlap = self.storage.ranks.any_of([layout.has_any(begin, end) for _, _, layout in pressed])
        for (below, tier, _), is_overlap in zip(pressed, overlap, strict=True):
            if is_overlap and below.id in self.nodes and tier in below.kv.copies:
                self.placement.remove_copy(below, tier)
                self.after_loss(below)

    def forget_ssd(self) -> None:
        """Forget every copy on the SSD, which is gone."""
        for node in list(iter_nodes(self.leaves.root))[::-1]:
            if node.id in self.nodes and Tier.SSD in node.kv.copies:
                self.placement.remove_copy(node, Tier.SSD)
                if node.lock_ref == 0 or node.value is not None:
                    self.after_loss(node)

    def flush_tier_copies(self, tier: Tier) -> None:
        """Forget every copy on a tier that nobody uses now; nodes that have one below stay. On the SSD also copies of
        what requests hold on the GPU: of its entries only those stay that are still to be loaded.
        """
        for node in list(iter_nodes(self.leaves.root))[::-1]:
            if node.id not in self.nodes:
                continue
            if node.lock_ref > 0:
                if tier == Tier.SSD and tier in node.kv.copies and node.value is not None:
                    self.placement.remove_copy(node, tier)
                    self.after_loss(node)
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
                self.placement.remove_copy(node, tier)
                self.after_loss(node)
        if tier == Tier.SSD and self.storage.ssd is not None:
            self.storage.ssd.clear(self.storage.workers["write"])
