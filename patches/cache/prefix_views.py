"""Prefixes that requests take from the tree."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.decode_budget.state import budget_of, view_between
from sglang_evicpress.patches.tree.changes import Signal
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import path_to, view_of_path
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.tree.types import Node, ServedRequest

logger = logging.getLogger(__name__)


class PrefixViews:
    """``admitted`` tells of each user's request that runs, with the nodes of its prefix and their number of tokens."""

    def __init__(self, device: torch.device, num_failed: Counter[str]) -> None:
        self.admitted = Signal[[ServedRequest, list[Node], int]]()
        self._device = device
        self._num_failed = num_failed

    def view_of(self, req: ServedRequest) -> PrefixView:
        """The prefix that a request took from the tree; an empty one for a request that was never matched."""
        view = getattr(req, "evicpress", None)
        if not isinstance(view, PrefixView):
            view = req.evicpress = view_of_path((), self._device)
        return view

    def adopt(self, req: ServedRequest) -> PrefixView:
        """The view a request's row is written from, now that it is scheduled; counts its hit, once."""
        num_tokens, state = REQUEST_KV.prefix_len(req), budget_of(req)
        if state is not None and state.has_left_tree:
            return view_between(req, state)
        if num_tokens == 0:
            req.evicpress = view_of_path((), self._device)
        view = self.view_of(req)
        if len(view.slots) + view.holes != num_tokens:
            logger.error("evicpress: %.64r has a prefix of %d tokens and a view of others", req.rid, num_tokens)
            self._num_failed["adopt view"] += 1
            slots = req.prefix_indices[req.prefix_indices != 0].to(torch.int64)  # a hole is slot 0
            view = req.evicpress = PrefixView(slots, num_tokens - len(slots), is_lossy=True)
        if not view.is_counted:
            view.is_counted = True
            if state is not None:
                state.num_cached = num_tokens
            path = path_to(req.last_node) if num_tokens and req.last_node is not None else []
            if not is_shadow_name(req.extra_key):
                self.admitted(req, path, num_tokens)
        return view
