"""Compressing nodes where they are, on the GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_evicpress.core import Decision, Form, Tier
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.tiers.types import Changes, Removals, Slots
from sglang_evicpress.patches.tree.node import kv_of, num_slots, slots_of, start_of
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.press import QueryWindow, get_press
from sglang_evicpress.survivors import SurvivorLayout

if TYPE_CHECKING:
    from sglang_evicpress.patches.tree.compressor import Compressor

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class GpuOps:
    """Changes nodes on the GPU. ``num_sinks``: tokens at the begin of a prompt that every press keeps."""

    nodes: Mapping[int, Node]
    menu: Menu
    num_sinks: int
    press: Compressor
    allocator: Allocator
    ledger: Slots
    changes: Changes
    removal: Removals

    @property
    def is_alone(self) -> bool:
        """True if no other rank must do as this one does."""
        return self.press.is_alone

    def sinks_of(self, num_tokens: int, start: int) -> int:
        """How many of a node's tokens are among the first of the prompt, which every press keeps."""
        return max(0, min(num_tokens, self.num_sinks - start))

    def slots_in(self, node: Node, form: Form, start: int, current: Form | None = None) -> int | None:
        """Slots of a node once brought from the form ``current``, its own if None, to ``form``; None when it cannot be:
        it is lossy by another press or budget or keeps no more than that already, or the queries that the press needs
        are not there. A node that holds what a split has left may already have fewer in some layers."""
        kept = self.kept_in(node, form, start, current or node.kv.form, node.kv.layout)
        return max(kept) if isinstance(kept, tuple) else kept

    def kept_in(
        self, node: Node, form: Form, start: int, current: Form, layout: SurvivorLayout | None
    ) -> int | tuple[int, ...] | None:
        """Tokens that each layer of a node keeps once brought from the form ``current`` to ``form``, where they differ
        those of each group of layers; None as ``slots_in``. ``layout``: of what it is made of."""
        if form.press is None or (form.is_uneven and form.budget not in self.menu.groups.shares):
            return None
        if current.press is not None and (current.method != form.method or current.kept_fraction <= form.kept_fraction):
            return None
        if get_press(form.press).needs_queries and self.window_of(node) is None:
            return None
        num_tokens = len(node.key)
        sinks = self.sinks_of(num_tokens, start)
        if not form.is_uneven:
            return self.menu.num_slots(form, num_tokens, sinks)
        counts, layers = self.menu.layer_counts(form, num_tokens, sinks), self.menu.groups.group_of
        if layout is None:
            return counts
        return tuple(min(count, layout.count_of(layers.index(group))) for group, count in enumerate(counts))

    def window_of(self, node: Node) -> QueryWindow | None:
        """The queries kept for a node, if any."""
        return None if PromptQueries.active is None else PromptQueries.active.kept(node.kv.window)

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node to ``form`` in place; returns the slots freed. It must be unlocked and have that option. Where
        the device has no memory for the scores, the node goes, and all below it in the tree: room is needed now."""
        node = self.nodes[node_id]
        before = num_slots(node)
        kept = self.kept_in(node, form, start_of(node), node.kv.form, node.kv.layout)
        after = max(kept) if isinstance(kept, tuple) else kept
        if node.lock_ref > 0 or node.value is None or kept is None or after is None or after >= before:
            raise RuntimeError(f"evicpress: node {node_id} cannot be brought to {form}")
        slots = slots_of(node)
        kv = node.kv
        try:
            layout, value = self.press.compress(form, kv_of(node, self.window_of(node)), kept)
        except torch.OutOfMemoryError as error:  # perhaps between moving its KV and knowing where that is
            logger.warning("evicpress: node %d was dropped: no device memory to compress it: %s", node_id, error)
            free = self.allocator.available_size()
            self.removal.drop_tree(node)
            return self.allocator.available_size() - free
        except Exception:
            if self.press.is_alone:
                self.removal.drop_tree(node)  # its KV may be in part moved
            raise
        kv.layout, node.value = layout, value
        kv.form = form
        kv.version += 1
        kv.origin = node.id if kv.origin is None else kv.origin
        kv.slots = slots[:after].clone()
        self.ledger.remove(before - after)
        self.changes.changed(node)
        self.ledger.free_or_keep(slots[after:])
        return before - after

    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        """While a plan is carried out on several ranks, which agree on its compressions at once."""
        asked = []
        # What a node becomes by its second decision is not known yet.
        first = {decision.node_id: decision for decision in reversed(decisions)}
        for decision in first.values():
            node, form = self.nodes.get(decision.node_id), decision.option.form
            if node is None or form is None or node.value is None or decision.option.tier != Tier.GPU:
                continue
            after = self.slots_in(node, form, start_of(node))
            if node.lock_ref == 0 and after is not None and after < num_slots(node):
                asked.append((form, kv_of(node, self.window_of(node)), after))
        return self.press.together(asked)
