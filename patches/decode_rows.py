"""Rewriting the row of a running request, and parting it from the tree. Touches no SGLang name.

Between two steps of the scheduler, with rows and hole table on its stream, behind the barrier that guards them.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_evicpress.layout import to_device
from sglang_evicpress.patches import rows
from sglang_evicpress.patches.decode_state import num_shared
from sglang_evicpress.patches.node import PrefixView, path_to


def row_of(cache: Any, req: Any, num_slots: int) -> torch.Tensor:
    """int64 [n], a copy."""
    row = cache.req_to_token_pool.req_to_token[req.req_pool_idx]
    return row[:num_slots].to(torch.int64, copy=True)


def put_row(cache: Any, req: Any, slots: torch.Tensor, num_dropped: int) -> None:
    """The row is ``slots`` [n] now, and ``num_dropped`` more of its tokens (whole pages) have none."""
    row = cache.req_to_token_pool.req_to_token[req.req_pool_idx]
    row[: len(slots)] = slots.to(row.dtype)
    if num_dropped == 0:
        return
    row[len(slots) : len(slots) + num_dropped] = 0  # a stale tail would look like a use after free
    req.kv_budget.num_dropped += num_dropped
    req.kv_committed_len -= num_dropped
    req.kv_allocated_len -= num_dropped
    rows.table().add(req.req_pool_idx, num_dropped)


def take_slots(cache: Any, num_slots: int) -> torch.Tensor | None:
    """``num_slots`` (whole pages) of the pool, of prefixes nobody uses if it is full; None without so many."""
    cache.make_room(num_slots)
    slots: torch.Tensor | None = cache.token_to_kv_pool_allocator.alloc(num_slots)
    return slots


def leave_tree(cache: Any, req: Any) -> None:
    """The request gives up its lock: no slot of its row may be the tree's any more, and all its holes are its own."""
    state, holes = req.kv_budget, req.evicpress.holes
    state.num_dropped += holes
    state.has_left_tree = True
    req.kv_committed_len -= holes
    req.kv_allocated_len -= holes
    cache.dec_lock_ref(req.last_node)
    req.last_node = cache.root_node
    req.cache_protected_len = 0
    req.prefix_indices = req.prefix_indices[:0]
    req.evicpress = PrefixView(req.prefix_indices, 0, True, True)


def unshare(cache: Any, req: Any) -> bool:
    """Copy what the tree owns of the row into slots of the request; whether there was room for that."""
    shared = num_shared(req)
    req.kv_budget.positions = path_positions(cache, req)
    if shared > 0:
        mine = take_slots(cache, shared)
        if mine is None:
            return False
        row = cache.req_to_token_pool.req_to_token[req.req_pool_idx]
        try:
            cache.compressor.copy(row_of(cache, req, shared), mine)
            row[:shared] = mine.to(row.dtype)
        except torch.OutOfMemoryError:
            cache.token_to_kv_pool_allocator.free(mine)
            raise
    leave_tree(cache, req)
    return True


def path_positions(cache: Any, req: Any) -> torch.Tensor | None:
    """What the slots of its prefix in the tree hold, int32 [L, H, n]; None when that is their order in the text."""
    if req.evicpress.holes == 0:
        return None
    compressor, device, begin, parts = cache.compressor, cache.device, 0, []
    for node in path_to(req.last_node):
        end = begin + len(node.key)
        layout = node.kv.layout
        if layout is None:
            whole = torch.arange(begin, end, dtype=torch.int32, device=device)
            parts.append(whole.expand(compressor.num_layers, compressor.num_heads, -1))
        else:
            parts.append(to_device(layout.positions.int(), device))
        begin = end
    return torch.cat(parts, -1)
