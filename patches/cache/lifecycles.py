"""The radix cache as each release calls it: translation only, all that it does is in ``EvicPressCache``."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from sglang_evicpress.patches.cache.radix_cache import EvicPressCache
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.hook_points import of_release
from sglang_evicpress.patches.tree.node import holes_of


class CacheOf0515(EvicPressCache):
    """SGLang 0.5.15.post1: a request itself says how much of its KV is good."""

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        self.late_checkpoints.settle()
        is_insert = self.decode_budgets.note_end(req) and is_insert  # first: from then on it holds no KV
        self.end_request(req, req.pop_committed_kv_cache(), is_insert=is_insert)
        _unlock_last(self, req)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        self.late_checkpoints.keep(req, req.get_fill_ids(), is_chunk=chunked)


class CacheOf0517(EvicPressCache):
    """SGLang 0.5.17: who ends a request says how much of its KV is good."""

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        self.late_checkpoints.settle()
        is_insert = self.decode_budgets.note_end(req) and is_insert
        self.end_request(req, kv_len_to_handle, is_insert=is_insert)
        _unlock_last(self, req)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        self.late_checkpoints.keep(req, req.get_fill_ids(), is_chunk=chunked)


def _unlock_last(cache: EvicPressCache, req: Any) -> None:
    if req.last_node is not None:
        cache.dec_lock_ref(req.last_node)


class CacheOf0523(EvicPressCache):
    """SGLang 0.5.23: a request checkpoints while it runs and once more when it ends, then gives back its row by
    position, then unlocks, then gives back what was computed beyond its end. Its end begins with ``claim_kv_row``;
    positions are logical, so the row is given back whole, where the first range of it is."""

    disable_finished_insert = False  # such a request does not checkpoint
    _ending: Any = None
    _ending_is_kept = False
    _holes = 0

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        if req is self._ending:
            self._ending_is_kept = True
            return
        tokens = req.full_untruncated_fill_ids
        self.late_checkpoints.keep(req, tokens[:up_to], is_chunk=up_to < len(tokens))

    def claim_kv_row(self, req: Any) -> bool:
        self.late_checkpoints.settle()
        self._ending, self._ending_is_kept = req, False
        return False

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        req, self._ending = self._ending, None
        if req is not None:
            self._holes = holes_of(req)
            is_insert = self.decode_budgets.note_end(req) and self._ending_is_kept
            self.end_request(req, ranges[-1][1], is_insert=is_insert)
            return
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        for begin, end in ranges:  # computed ahead, beyond the end of the same request
            self.ledger.free(row[begin - self._holes : end - self._holes].to(torch.int64, copy=True))

    def path_device_indices(self, node: Any) -> torch.Tensor:
        """Logical: a hole is slot 0."""
        values = []
        while node is not self.root_node:
            values.append(node.value)
            node = node.parent
        return torch.cat(values[::-1]) if values else torch.empty(0, dtype=torch.int64, device=self.device)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Logical. Chunks of a request that may not be in the tree (``skip_radix_cache_insert``) do not checkpoint:
        they are only in its row."""
        known = len(req.prefix_indices)
        if known < req.prefix_len:
            view = self.views.view_of(req)
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            own = row[known - view.holes : req.prefix_len - view.holes].to(torch.int64, copy=True)
            REQUEST_KV.set_prefix(req, torch.cat([req.prefix_indices, own]))
            req.evicpress = view.extended(own, len(view.slots))
        indices: torch.Tensor = req.prefix_indices[: req.prefix_len]
        return indices

    def touch_prefix(self, key: Any) -> None:
        """SGLang tells what those in the queue will use, and would split nodes for it: ``queued_hits`` knows."""


def cache_class(version: str | None = None) -> type[EvicPressCache]:
    """The class for a version, by default the installed one."""
    choices: dict[str, type[EvicPressCache]] = {"0.5.15": CacheOf0515, "0.5.16": CacheOf0517, "0.5.18": CacheOf0523}
    return of_release(importlib.metadata.version("sglang") if version is None else version, choices)
