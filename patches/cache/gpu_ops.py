"""The moves on the device tier: what can be done with a node, and doing it. The ``GpuOps`` of the controller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_evicpress.controller.controller import NOT_MEASURED
from sglang_evicpress.core import DROP, Decision, Form, Option, Tier
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.tree.node import is_lossy, num_slots, slots_of, start_of
from sglang_evicpress.press import QueryWindow, get_press

logger = logging.getLogger(__name__)


class GpuOps:
    """The part of EvicPressCache that changes nodes on the GPU. Everything here runs on the scheduler thread."""

    def options_of(self: Any, node: Any) -> tuple[Option, ...]:
        """Options of a node now; none while it is locked.

        Whether its children allow a drop is the plan's business.
        """
        if node.lock_ref > 0 or node.value is None:
            return ()
        stats, menu = self.stats_of(node), self.menu
        options = []
        for index, form in enumerate(menu.forms):
            num_bytes = menu.num_bytes(form, stats.num_tokens, stats.sinks)
            if stats.allowed_forms >> index & 1 and num_bytes < stats.num_bytes:
                options.append(Option(form, Tier.GPU, num_bytes))
        return (*options, DROP)

    def slots_in(self: Any, node: Any, form: Form, start: int, current: Form | None = None) -> int | None:
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
        slots: int = self.menu.num_slots(form, num_tokens, self.sinks_of(num_tokens, start))
        return slots

    def window_of(self: Any, node: Any) -> QueryWindow | None:
        """The queries kept for a node, if any."""
        return None if PromptQueries.active is None else PromptQueries.active.kept(node.kv.window)

    def compress(self: Any, node_id: int, form: Form) -> int:
        """Bring a node to ``form`` in place; returns the slots freed. It must be unlocked and have that option. What is
        on the host is brought there in the background. Where the device has no memory for the scores, the node goes,
        and all below it in the tree: room is needed now."""
        node = self.nodes[node_id]
        if node.value is None:
            self.compress_on_host(node, form)
            return 0
        before = num_slots(node)
        after = self.slots_in(node, form, start_of(node))
        if node.lock_ref > 0 or node.value is None or after is None or after >= before:
            raise RuntimeError(f"evicpress: node {node_id} cannot be brought to {form}")
        slots = slots_of(node)
        kv = node.kv
        try:
            layout, value = self.compressor.compress(**self._asked(node, form, after))
        except torch.OutOfMemoryError as error:  # perhaps between moving its KV and knowing where that is
            logger.warning("evicpress: node %d was dropped: no device memory to compress it: %s", node_id, error)
            free = self.token_to_kv_pool_allocator.available_size()
            self.drop_tree(node)
            return int(self.token_to_kv_pool_allocator.available_size() - free)
        except Exception:
            if self.is_alone:
                self.drop_tree(node)  # its KV may be in part moved
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

    def together(self: Any, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        """While a plan is carried out on several ranks, which agree on its compressions at once."""
        asked: list[dict[str, Any]] = []
        first = {
            decision.node_id: decision for decision in reversed(decisions)
        }  # what it becomes then is not known yet
        for decision in first.values():
            node, form = self.nodes.get(decision.node_id), decision.option.form
            if node is None or form is None or node.value is None or decision.option.tier != Tier.GPU:
                continue
            after = self.slots_in(node, form, start_of(node))
            if node.lock_ref == 0 and after is not None and after < num_slots(node):
                asked.append(self._asked(node, form, after))
        agreement: AbstractContextManager[None] = self.compressor.together(asked)
        return agreement

    def _asked(self: Any, node: Any, form: Form, num_kept: int) -> dict[str, Any]:
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

    def set_aside(self: Any, node_id: int) -> None:
        """A move of the node failed: plans make room of others for a while."""
        self.aside.add(node_id, self.now_s)

    def retry_set_aside(self: Any) -> None:
        """Plan again with nodes that were set aside for long enough, and free what could not be freed."""
        self.aside.return_due(self.now_s)
        for slots in self.ledger.take_unfreed():
            try:
                self.ledger.free_or_keep(slots)
            except Exception as error:
                if not self.is_alone:
                    raise
                self.controller.num_failed[f"free {type(error).__name__}"] += 1

    @property
    def num_failed_moves(self: Any) -> int:
        return sum(self.controller.num_failed.values())

    @property
    def is_alone(self: Any) -> bool:
        return bool(self.compressor.is_alone)

    def lacks_exact(self: Any, node: Any) -> bool:
        """True if a node that is about to become lossy should have its exact KV on the SSD first: it is had sooner from
        there than by computing it, and a promotion through it would be of worth."""
        if self.ssd is None or is_lossy(node) or Tier.SSD in node.kv.copies or self.config.policy != "evicpress":
            return False
        if not self.adapters.may_reach_ssd(node):
            return False
        num_tokens = len(node.key)
        load_s = self.costs.load_seconds(Tier.SSD, num_tokens * self.menu.slot_bytes)
        is_sooner: bool = load_s < self.costs.prefill.marginal_seconds(num_tokens, start_of(node))
        return is_sooner

    def cause_of_drop(self: Any, node_id: int) -> str | None:
        """Why a node can become nothing else, where that is that no form of it was measured."""
        node = self.nodes[node_id]
        could_shrink = (
            self.planner.policy.compresses and len(node.key) >= self.config.min_compress_tokens and not is_lossy(node)
        )
        if self.planner.policy.weighs_quality and could_shrink and not self.quality.expectation_of(node).known:
            return NOT_MEASURED
        return None

    def drop(self: Any, node_id: int, cause: str = "lost", number: int | None = None) -> int:
        """Forget a childless, unlocked node, for ``cause``, by the decision of that number in the journal if any;
        returns the slots freed."""
        node = self.nodes[node_id]
        if node.lock_ref > 0 or node.children:
            raise RuntimeError(f"evicpress: node {node_id} is locked or has children and cannot be dropped")
        freed = num_slots(node)
        self.note_drop(node, cause, number)
        self.planner.remove(node_id)  # what can fail comes first
        try:
            self.remove_copies(node)
            if node.value is not None:
                if not node.kv.is_shadow:  # users' nodes of the same tokens would be taken for gone
                    self._record_remove_event(node)
                self.ledger.free(slots_of(node))
        except Exception:
            if node.value is not None or node.kv.copies:
                self.changes.changed(node)
                raise
        self._delete_leaf(node)
        return freed
