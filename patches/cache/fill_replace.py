"""Exchange of a node's KV: absent nodes get KV, lossy ones get it exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_evicpress.core import EXACT
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.types import Changes, Copies, Removals, Slots
from sglang_evicpress.patches.tree.changes import Listener
from sglang_evicpress.patches.tree.node import (
    is_lossy,
    iter_nodes,
    kv_of,
    num_slots,
    servable_steps,
    slots_of,
    start_of,
)
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.press import QueryWindow
from sglang_evicpress.survivors import SurvivorLayout

if TYPE_CHECKING:
    from sglang_evicpress.patches.tree.compressor import Compressor

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class FillReplace:
    """Gives nodes the KV of requests. ``backup_parent`` is told of children that wait for a parent to be copied,
    ``drop_window`` of nodes whose queries are of no more use."""

    nodes: Mapping[int, Node]
    placement: Copies
    removal: Removals
    ledger: Slots
    changes: Changes
    compressor: Compressor
    min_match_kept: float
    window_of: Callable[[Node], QueryWindow | None]
    drop_window: Listener
    backup_parent: Listener

    def is_promotion(self, node: Node, view: PrefixView, gain: float = 0.0) -> bool:
        """True if a request's own KV is worth more than what the node holds, and may take its place now. ``gain``: by
        so much its quality is predicted to be higher where both are lossy."""
        if node.lock_ref > 0 or self._keeps_form(node):
            return False
        is_servable = servable_steps([(node, len(node.key))], self.min_match_kept) == 1
        return not is_servable or (is_lossy(node) and (gain > 0.0 if view.is_lossy else True))

    def would_change_view(self, steps: Sequence[tuple[Node, int]], adopted: int, view: PrefixView) -> bool:
        """True if handing in the tokens of ``steps`` would put other KV under a running request than it has computed.

        It would where the tree holds the same tokens beyond ``adopted`` and either copy is lossy, unless the tree's
        can be replaced whole. Nothing is split or touched.
        """
        begin = 0
        adopted_ids = {node.id for node, matched in steps if matched == len(node.key)}
        for node, matched in steps:
            if begin >= adopted and (view.is_lossy or (is_lossy(node) and node.lock_ref > 0)):
                return True
            if begin + matched > adopted and self._keeps_form(node, matched, adopted_ids):
                return True
            begin += matched
        return False

    def _keeps_form(self, node: Node, num_tokens: int | None = None, adopted_ids: Collection[int] = ()) -> bool:
        """True if a lossy node, or its first tokens, is to stay lossy although a request has its exact KV: nodes below
        it that are not on the GPU, but for ``adopted_ids``, hold, in some heads, positions of it, would have to be
        given up, and have more tokens than it has."""
        if node.kv.layout is None or not self.compressor.is_alone:
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

    def fill(self, node: Node, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        """Give a node that is not on the GPU the KV a request computed for its tokens: all of it, or as much as the
        node has kept."""
        kv, layout = node.kv, node.kv.layout
        is_exact = not (is_lossy_prefix or kv.is_lossy_prefix)
        if is_exact and layout is not None and self._keeps_form(node) and not layout.has_any(0, start_of(node)):
            self._fill_as(node, layout, value)
        else:
            self._fill_with_all(node, value, is_lossy_prefix)
        for child in node.children.values():
            if child.value is None:
                self.backup_parent(child)
                break

    def _fill_with_all(self, node: Node, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        if is_lossy_prefix or is_lossy(node):
            self.placement.remove_copies(node, lossy_only=True)
        node.kv.is_leaving = False
        _set_full(node, value, is_lossy_prefix)
        self.placement.note_resident(node)
        self.ledger.add(len(node.key))
        self.changes.changed(node)
        self.removal.drop_overlaps(node)

    def _fill_as(self, node: Node, layout: SurvivorLayout, value: torch.Tensor) -> None:
        """Give it what its copy, of this layout, has kept of its tokens, whose exact KV is in ``value``."""
        self.compressor.copy_held(layout, start_of(node), value)
        self.ledger.free(value[layout.num_slots :])
        node.kv.is_leaving = False
        self.placement.place(node, node.kv.copies[tier_of(node)], value[: layout.num_slots])

    def replace(self, node: Node, value: torch.Tensor, is_lossy_prefix: bool) -> None:
        """Give an unlocked lossy node the KV a request computed for the same tokens: a promotion."""
        self.ledger.free(slots_of(node))
        self.ledger.add(len(node.key) - num_slots(node))
        _set_full(node, value, is_lossy_prefix)
        self.drop_window(node)
        self.placement.remove_copies(node, lossy_only=True)
        self.changes.changed(node)
        begin = start_of(node)
        for below in list(iter_nodes(node)):
            if below.value is not None and below.id in self.nodes:
                self._trim(below, (begin, begin + len(node.key)))
        self.removal.drop_overlaps(node)

    def _trim(self, node: Node, replaced: tuple[int, int]) -> None:
        """Take from a compressed node what an ancestor's new KV holds as well; see ``Compressor.trim``."""
        kv, slots, before = node.kv, slots_of(node), num_slots(node)
        try:
            trimmed = self.compressor.trim(kv.form, kv_of(node, self.window_of(node)), replaced)
        except torch.OutOfMemoryError as error:  # on every rank; its KV may be in part moved
            logger.warning("evicpress: node %d was dropped: no device memory to trim it: %s", node.id, error)
            self.removal.drop_tree(node)
            return
        if trimmed is None:
            return
        kv.layout, node.value = trimmed
        after = kv.layout.num_slots
        kv.slots = slots[:after].clone()
        kv.version += 1
        self.ledger.free(slots[after:])
        self.ledger.remove(before - after)
        self.placement.remove_copies(node, lossy_only=True)
        self.changes.changed(node)


def _set_full(node: Node, value: torch.Tensor, is_lossy_prefix: bool) -> None:
    """Let the record of a node say that it holds one slot for each token."""
    kv, node.value = node.kv, value.clone()
    kv.form, kv.slots, kv.layout, kv.is_lossy_prefix, kv.origin = EXACT, None, None, is_lossy_prefix, None
    kv.prefix_quality = 1.0
    kv.is_finite, kv.unfit_codec = True, None
    kv.version += 1
