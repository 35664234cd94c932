"""Rewriting the rows of running requests, and parting them from the tree. Touches no SGLang name.

Between two steps of the scheduler, with rows and hole table on its stream, behind the barrier that guards them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_evicpress.device import to_device
from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.types import RowPool
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.decode_budget.state import BudgetedRequest, num_shared
from sglang_evicpress.patches.scheduler.paged_allocator import PagedPool
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node import path_to
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.tree.types import Allocator, Node


class PoolAllocator(Allocator, PagedPool, Protocol):
    """SGLang's allocator, with its free pages."""


class DecodeTree(Protocol):
    """The cache, as far as passes over running requests touch it."""

    page_size: int
    device: torch.device | str
    root_node: Node
    req_to_token_pool: RowPool
    token_to_kv_pool_allocator: PoolAllocator

    def make_whole_room(self, num_slots: int) -> None: ...
    def keep_running(self, req: BudgetedRequest, token_ids: Sequence[int], *, is_chunk: bool) -> None:
        """Offer its prompt to the tree."""


def row_indices(reqs: Sequence[BudgetedRequest]) -> list[int]:
    """The rows of requests that run."""
    return [row for row in map(REQUEST_KV.row_of, reqs) if row is not None]


def rows_on_device(tree: DecodeTree, reqs: Sequence[BudgetedRequest]) -> torch.Tensor:
    """int64 [R]: the rows of these requests, for the device to index by."""
    return to_device(torch.tensor(row_indices(reqs)), tree.device)


def row_of(tree: DecodeTree, req: BudgetedRequest, num_slots: int) -> torch.Tensor:
    """int64 [n], a copy."""
    row = tree.req_to_token_pool.req_to_token[REQUEST_KV.row_of(req)]
    return row[:num_slots].to(torch.int64, copy=True)


def rows_of(tree: DecodeTree, index: torch.Tensor, num_slots: int) -> torch.Tensor:
    """int64 [R, n], copies of the first ``num_slots`` slots of the rows ``index`` [R]."""
    return tree.req_to_token_pool.req_to_token[:, :num_slots].index_select(0, index).to(torch.int64)


def put_rows(
    tree: DecodeTree, reqs: Sequence[BudgetedRequest], index: torch.Tensor, slots: torch.Tensor, num_dropped: int
) -> None:
    """The rows of ``reqs``, ``index`` [R] on the device, are ``slots`` [R, n] now, and ``num_dropped`` more of the
    tokens of each (whole pages) have none."""
    rows_of_all, num_slots = tree.req_to_token_pool.req_to_token, slots.shape[1]
    rows_of_all[:, :num_slots].index_copy_(0, index, slots.to(rows_of_all.dtype))
    if num_dropped == 0:
        return
    # A stale tail would look like a use after free.
    rows_of_all[:, num_slots : num_slots + num_dropped].index_fill_(0, index, 0)
    for req in reqs:
        req.kv_budget.num_dropped += num_dropped
        REQUEST_KV.shorten(req, num_dropped)
    req_to_token.table().add(row_indices(reqs), num_dropped, index)


def take_slots(tree: DecodeTree, num_slots: int) -> torch.Tensor | None:
    """``num_slots`` (whole pages) of the pool, of prefixes nobody uses if it is full; None without so many."""
    tree.make_whole_room(num_slots)
    return tree.token_to_kv_pool_allocator.alloc(num_slots)


def leave_tree(tree: DecodeTree, req: BudgetedRequest) -> None:
    """The request gives up its lock: no slot of its row may be the tree's any more, and all its holes are its own."""
    state, holes = req.kv_budget, req.evicpress.holes
    state.num_dropped += holes
    state.has_left_tree = True
    REQUEST_KV.shorten(req, holes)
    REQUEST_KV.relock(tree, req, tree.root_node)
    REQUEST_KV.set_protected_len(req, 0)
    REQUEST_KV.set_prefix(req, req.prefix_indices[:0])
    req.evicpress = PrefixView(req.prefix_indices, 0, True, True)


def unshare(tree: DecodeTree, compressor: Compressor, reqs: Sequence[BudgetedRequest]) -> bool:
    """Copy what the tree owns of these rows into slots of the requests, in one batch; whether there was room for it.
    Nothing is changed where there is not, nor where this raises torch.OutOfMemoryError."""
    counts = [num_shared(req) for req in reqs]
    positions = [path_positions(tree, compressor, req) for req in reqs]
    if sum(counts) > 0:
        own_slots = take_slots(tree, sum(counts))
        if own_slots is None:
            return False
        try:
            shared = [row_of(tree, req, count) for req, count in zip(reqs, counts, strict=True)]
            compressor.copy(shared, own_slots)
            row_table = tree.req_to_token_pool.req_to_token
            written = own_slots.to(row_table.dtype).split(counts)
        except torch.OutOfMemoryError:
            tree.token_to_kv_pool_allocator.free(own_slots)
            raise
        for req, slots in zip(reqs, written, strict=True):
            row_table[REQUEST_KV.row_of(req), : len(slots)] = slots
    for req, held in zip(reqs, positions, strict=True):
        req.kv_budget.positions = held
        leave_tree(tree, req)
    return True


def path_positions(tree: DecodeTree, compressor: Compressor, req: BudgetedRequest) -> torch.Tensor | None:
    """Positions in the slots of its prefix in the tree, int32 [L, H, n]; None when that is their order in the text."""
    if req.evicpress.holes == 0:
        return None
    begin, parts = 0, []
    for node in path_to(req.last_node):
        end = begin + len(node.key)
        layout = node.kv.layout
        if layout is None:
            whole = torch.arange(begin, end, dtype=torch.int32, device=tree.device)
            parts.append(whole.expand(compressor.num_layers, compressor.num_heads, -1))
        else:
            parts.append(to_device(layout.positions.int(), tree.device))
        begin = end
    return torch.cat(parts, -1)
