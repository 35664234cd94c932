"""Compressing nodes where they are, on the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypedDict

import torch

from sglang_evicpress.core import DROP, Decision, Form, NodeStats, Option, Tier
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.tiers.types import Changes, Slots
from sglang_evicpress.patches.tree.node import num_slots, slots_of, start_of
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.press import QueryWindow, get_press
from sglang_evicpress.survivors import SurvivorLayout

logger = logging.getLogger(__name__)


class Asked(TypedDict):
    """Arguments of one compression."""

    form: Form
    slots: torch.Tensor
    layout: SurvivorLayout | None
    start: int
    num_tokens: int
    num_kept: int
    window: QueryWindow | None


class Presses(Protocol):
    """Compressing slots of the pool, on all ranks alike."""

    @property
    def is_alone(self) -> bool:
        """No other rank must do as this one does."""

    def compress(
        self,
        *,
        form: Form,
        slots: torch.Tensor,
        layout: SurvivorLayout | None,
        start: int,
        num_tokens: int,
        num_kept: int,
        window: QueryWindow | None,
    ) -> tuple[SurvivorLayout, torch.Tensor]:
        """Layout and slots [logical] of what is kept."""

    def together(self, asked: Sequence[Mapping[str, object]]) -> AbstractContextManager[None]:
        """While these are carried out, which ranks agree on at once."""


class Trees(Protocol):
    """Nodes that go with all below them."""

    def drop_tree(self, node: Node) -> None:
        """Forget a node and all below it in the tree."""


class GpuOps:
    """Changes nodes on the GPU. ``num_sinks``: tokens at the begin of a prompt that every press keeps; ``stats_of``:
    a node as the policy sees it."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        menu: Menu,
        num_sinks: int,
        press: Presses,
        allocator: Allocator,
        ledger: Slots,
        changes: Changes,
        removal: Trees,
        stats_of: Callable[[Node], NodeStats],
    ) -> None:
        self._nodes = nodes
        self._menu = menu
        self._num_sinks = num_sinks
        self._press = press
        self._allocator = allocator
        self._ledger = ledger
        self._changes = changes
        self._removal = removal
        self._stats_of = stats_of

    def options_of(self, node: Node) -> tuple[Option, ...]:
        """What can be done now with a node; nothing while it is locked.

        Whether its children allow a drop is the plan's business.
        """
        if node.lock_ref > 0 or node.value is None:
            return ()
        stats, menu = self._stats_of(node), self._menu
        options = []
        for index, form in enumerate(menu.forms):
            num_bytes = menu.num_bytes(form, stats.num_tokens, stats.sinks)
            if stats.allowed_forms >> index & 1 and num_bytes < stats.num_bytes:
                options.append(Option(form, Tier.GPU, num_bytes))
        return (*options, DROP)

    def sinks_of(self, num_tokens: int, start: int) -> int:
        """How many of a node's tokens are among the first of the prompt, which every press keeps."""
        return max(0, min(num_tokens, self._num_sinks - start))

    def slots_in(self, node: Node, form: Form, start: int, current: Form | None = None) -> int | None:
        """Slots of a node once brought from the form ``current``, its own if None, to ``form``; None when it cannot be:
        it is lossy by another press or keeps no more than that already, or the queries that the press needs are not
        there."""
        current = current or node.kv.form
        if form.press is None:
            return None
        if not current.is_exact and (current.press != form.press or current.kept_fraction <= form.kept_fraction):
            return None
        if get_press(form.press).needs_queries and self.window_of(node) is None:
            return None
        num_tokens = len(node.key)
        return self._menu.num_slots(form, num_tokens, self.sinks_of(num_tokens, start))

    def window_of(self, node: Node) -> QueryWindow | None:
        """The queries kept for a node, if any."""
        return None if PromptQueries.active is None else PromptQueries.active.kept(node.kv.window)

    def compress(self, node_id: int, form: Form) -> int:
        """Bring a node to ``form`` in place; returns the slots freed. It must be unlocked and have that option. Where
        the device has no memory for the scores, the node goes, and all below it in the tree: room is needed now."""
        node = self._nodes[node_id]
        before = num_slots(node)
        after = self.slots_in(node, form, start_of(node))
        if node.lock_ref > 0 or node.value is None or after is None or after >= before:
            raise RuntimeError(f"evicpress: node {node_id} cannot be brought to {form}")
        slots = slots_of(node)
        kv = node.kv
        try:
            layout, value = self._press.compress(**self._asked(node, form, after))
        except torch.OutOfMemoryError as error:  # perhaps between moving its KV and knowing where that is
            logger.warning("evicpress: node %d was dropped: no device memory to compress it: %s", node_id, error)
            free = self._allocator.available_size()
            self._removal.drop_tree(node)
            return self._allocator.available_size() - free
        except Exception:
            if self._press.is_alone:
                self._removal.drop_tree(node)  # its KV may be in part moved
            raise
        kv.layout, node.value = layout, value
        kv.form = form
        kv.version += 1
        kv.origin = node.id if kv.origin is None else kv.origin
        kv.slots = slots[:after].clone()
        self._ledger.remove(before - after)
        self._changes.changed(node)
        self._ledger.free_or_keep(slots[after:])
        return before - after

    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        """While a plan is carried out on several ranks, which agree on its compressions at once."""
        asked: list[Asked] = []
        # What a node becomes by its second decision is not known yet.
        first = {decision.node_id: decision for decision in reversed(decisions)}
        for decision in first.values():
            node, form = self._nodes.get(decision.node_id), decision.option.form
            if node is None or form is None or node.value is None or decision.option.tier != Tier.GPU:
                continue
            after = self.slots_in(node, form, start_of(node))
            if node.lock_ref == 0 and after is not None and after < num_slots(node):
                asked.append(self._asked(node, form, after))
        return self._press.together(asked)

    def _asked(self, node: Node, form: Form, num_kept: int) -> Asked:
        """The compression of a resident node, as arguments of ``Compressor.compress``."""
        return {
            "form": form,
            "slots": slots_of(node),
            "layout": node.kv.layout,
            "start": start_of(node),
            "num_tokens": len(node.key),
            "num_kept": num_kept,
            "window": self.window_of(node),
        }
