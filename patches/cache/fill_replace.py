"""Exchange of a node's KV: absent nodes come into the tree, or get KV; lossy ones get it exact."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_evicpress.core import EXACT
from sglang_evicpress.device import to_device
from sglang_evicpress.patches.tiers.placement import NOWHERE, tier_of
from sglang_evicpress.patches.tree.node import (
    NodeKV,
    PrefixView,
    is_lossy,
    iter_nodes,
    num_slots,
    servable_steps,
    slots_of,
    start_of,
)
from sglang_evicpress.policy.reuse import weight_of_new
from sglang_evicpress.survivors import SurvivorLayout

logger = logging.getLogger(__name__)


class FillReplace:
    """The part of EvicPressCache that does it. Everything here runs on the scheduler thread."""

    def add_absent_leaf(self: Any, parent: Any, key: RadixKey, copy: Any) -> Any:
        """A node that is not on the GPU: ``copy`` is all there is of it. Raises RuntimeError where the tree goes on
        that way already."""
        way = key.child_key(self.page_size)
        if way in parent.children:
            raise RuntimeError(f"evicpress: node {parent.id} has a child that begins with the same page")
        node = TreeNode()
        node.parent, node.key, node.value, node.hit_count = parent, key, None, 1
        parent.children[way] = node
        node.kv = NodeKV(last_use=self._tick, last_use_s=self.now_s, slots=NOWHERE)
        self._note_text(node)
        num_siblings = 0 if parent is self.root_node else len(parent.children)
        node.kv.weight = weight_of_new(self.value_of_hit(), parent.kv.weight, num_siblings)
        if copy.layout is not None:
            copy.origin = node.id
        self.nodes[node.id] = node
        self.placement.add_copy(node, copy)
        self.quality.find_profiles(node)
        return node

    def _is_promotion(self: Any, node: Any, view: PrefixView) -> bool:
        """True if a request's own KV is worth more than what the node holds, and may take its place now."""
        if node.lock_ref > 0 or self._keeps_form(node):
            return False
        is_servable = servable_steps([(node, len(node.key))], self.config.min_match_kept) == 1
        return not is_servable or (is_lossy(node) and not view.is_lossy)

    def _would_change_view(self: Any, key: RadixKey, adopted: int, view: PrefixView) -> bool:
        """True if handing in ``key`` now would put other KV under a running request than it has computed.

        It would where the tree holds the same tokens beyond ``adopted`` and either copy is lossy, unless the tree's
        can be replaced whole. Nothing is split or touched.
        """
        begin, steps = 0, self._steps(key)
        adopted_ids = {node.id for node, matched in steps if matched == len(node.key)}
        for node, matched in steps:
            if begin >= adopted and (view.is_lossy or (is_lossy(node) and node.lock_ref > 0)):
                return True
            if begin + matched > adopted and self._keeps_form(node, matched, adopted_ids):
                return True
            begin += matched
        return False

    def _keeps_form(self: Any, node: Any, num_tokens: int | None = None, adopted_ids: Collection[int] = ()) -> bool:
        """True if a lossy node, or its first tokens, is to stay lossy although a request has its exact KV: nodes below
        it that are not on the GPU, but for those that are ``given`` theirs, hold, in some heads, positions of it, would
        have to be given up, and have more tokens than it has."""
        if node.kv.layout is None or not self.is_alone:
            return False
        num_tokens, begin = num_tokens or len(node.key), start_of(node)
        end, lost = begin + num_tokens, 0 if node.value is not None else len(node.key) - num_tokens
        for below in iter_nodes(node):
            copies = below.kv.copies.values() if below.value is None and below.id not in adopted_ids else ()
            if any(copy.layout is not None and copy.layout.has_any(begin, end) for copy in copies):
                lost += len(below.key)
            if lost > num_tokens:
                return True
        return lost > num_tokens

    def _fill(self: Any, node: Any, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        """Give a node that is not on the GPU the KV a request computed for its tokens: all of it, or as much as the
        node has kept."""
        kv, layout = node.kv, node.kv.layout
        is_exact = not (is_lossy_prefix or kv.is_lossy_prefix)
        if is_exact and self._keeps_form(node) and not layout.has_any(0, start_of(node)):
            self._fill_as(node, layout, value)
        else:
            self._fill_with_all(node, value, is_lossy_prefix)
        for child in node.children.values():
            if child.value is None:
                self.backup.backup_parent(child)
                break

    def _fill_with_all(self: Any, node: Any, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        kv = node.kv
        if is_lossy_prefix or is_lossy(node):
            self.placement.remove_copies(node, lossy_only=True)
        node.value, kv.is_leaving = value.clone(), False
        kv.form, kv.slots, kv.layout, kv.is_lossy_prefix, kv.origin = EXACT, None, None, is_lossy_prefix, None
        kv.version += 1
        self.placement.note_resident(node)
        self.ledger.add(len(node.key))
        self._record_store_event(node)
        self.changes.changed(node)
        self.removal.drop_overlaps(node)

    def _fill_as(self: Any, node: Any, layout: SurvivorLayout, value: torch.Tensor) -> None:
        """Give it what its copy, of this layout, has kept of its tokens, whose exact KV is in ``value``."""
        survivors = to_device(layout.positions, value.device) - start_of(node)
        self.compressor.wait_for_forward(value)
        self.compressor.copy_survivors(value, survivors, value[: layout.num_slots])
        self.ledger.free(value[layout.num_slots :])
        node.kv.is_leaving = False
        self.place(node, node.kv.copies[tier_of(node)], value[: layout.num_slots])

    def _replace(self: Any, node: Any, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        """Give an unlocked lossy node the KV a request computed for the same tokens: a promotion."""
        self.ledger.free(slots_of(node))
        self.ledger.add(len(node.key) - num_slots(node))
        node.value = value.clone()
        kv = node.kv
        kv.form, kv.slots, kv.layout, kv.is_lossy_prefix = EXACT, None, None, is_lossy_prefix
        kv.origin = None
        kv.version += 1
        self.drop_window(node)
        self.placement.remove_copies(node, lossy_only=True)
        self.changes.changed(node)
        begin = start_of(node)
        for below in list(iter_nodes(node)):
            if below.value is not None and below.kv.layout is not None and below.id in self.nodes:
                self._trim(below, (begin, begin + len(node.key)))
        self.removal.drop_overlaps(node)

    def _trim(self: Any, node: Any, replaced: tuple[int, int]) -> None:
        """Take from a compressed node what an ancestor's new KV holds as well; see ``Compressor.trim``."""
        kv, slots, before = node.kv, slots_of(node), num_slots(node)
        try:
            trimmed = self.compressor.trim(
                form=kv.form,
                slots=slots,
                layout=kv.layout,
                start=start_of(node),
                num_tokens=len(node.key),
                replaced=replaced,
                window=self.gpu_ops.window_of(node),
            )
        except torch.OutOfMemoryError as error:  # on every rank; its KV may be in part moved
            logger.warning("evicpress: node %d was dropped: no device memory to trim it: %s", node.id, error)
            self.removal.drop_tree(node)
            return
        if trimmed is None:
            return
        kv.layout, node.value = trimmed
        kv.slots = slots[: kv.layout.num_slots].clone()
        kv.version += 1
        self.ledger.free(slots[kv.layout.num_slots :])
        self.ledger.remove(before - kv.layout.num_slots)
        self.placement.remove_copies(node, lossy_only=True)
        self.changes.changed(node)
