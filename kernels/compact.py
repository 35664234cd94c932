"""In-place compaction: moves the survivors of a node, per layer and head, to the front of its slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.kernels.pool import (
    Backend,
    check_pools,
    layer_pointer,
    move_constants,
    pointer_table,
    runs_triton,
)

TILE_BYTES = 16384  # what one program keeps in flight


@triton.jit(do_not_specialize=["num_slots", "num_kept"])
def _compact_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    survivors: tl.tensor,
    num_slots: tl.tensor,
    num_kept: tl.tensor,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # table holds the layers of K, then those of V; one program moves one head of one of them in one node, front to
    # back.
    index = tl.program_id(0)
    head = tl.program_id(1)
    node = tl.program_id(2)
    rows = layer_pointer(table, index, DTYPE)
    first = ((index % NUM_LAYERS) * NUM_HEADS + head) * tl.num_programs(2) + node
    survivors += first.to(tl.int64) * num_kept
    slots += node.to(tl.int64) * num_slots
    dims = tl.arange(0, BLOCK_DIM)
    for start in range(0, num_kept, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        inside = tokens < num_kept
        origin = tl.load(survivors + tokens, mask=inside, other=0)
        source = tl.load(slots + origin, mask=inside, other=0).to(tl.int64)
        target = tl.load(slots + tokens, mask=inside, other=0).to(tl.int64)
        moves = (inside & (origin != tokens))[:, None] & (dims < HEAD_DIM)[None, :]
        read = (source[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
        write = (target[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
        tile = tl.load(rows + read, mask=moves, other=0)
        # A row that one warp writes may be the source of another: all are loaded before the first store.
        # Later tiles need no barrier, since survivors[j] >= j puts their sources past these targets.
        tl.debug_barrier()
        tl.store(rows + write, tile, mask=moves)


def compact(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    survivors: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Write the content of slot ``slots[survivors[l, h, j]]`` into slot ``slots[j]`` for every layer l,
    head h and j < m, in place and bit for bit; slots from ``slots[m]`` on, and all others, keep their bytes.

    ``survivors``: int32 ``[num_layers, num_heads, m]``, strictly ascending in the last dimension (not
    checked: that would wait for the device); ``slots`` holds no slot twice. R nodes of n slots at once: ``slots``
    ``[R, n]`` and ``survivors`` ``[num_layers, num_heads, R, m]``, indices within each node.
    Raises ValueError for shapes that do not fit, and as ``check_pool`` and ``runs_triton`` do.
    """
    slots, survivors = _as_nodes(slots, survivors)
    pool = check_pools(k_buffers, v_buffers, slots.flatten())
    if survivors.dtype != torch.int32 or survivors.dim() != 4 or slots.dim() != 2 or survivors.device != pool.device:
        raise ValueError(f"survivors must be int32 [layers, heads, m], or [layers, heads, nodes, m], on {pool.device}")
    num_nodes, num_kept = survivors.shape[2:]
    if (*survivors.shape[:2], num_nodes) != (pool.num_layers, pool.num_heads, len(slots)) or num_kept > slots.shape[1]:
        of_nodes = f" in {len(slots)} nodes" if len(slots) > 1 else ""
        raise ValueError(
            f"survivors {tuple(survivors.shape)} do not fit {pool.num_layers} layers of "
            f"{pool.num_heads} heads and {slots.shape[1]} slots{of_nodes}"
        )
    if not runs_triton(backend, pool.device):
        compact_torch(k_buffers, v_buffers, slots, survivors)
    elif num_kept and num_nodes:
        constants = move_constants(pool.num_layers, pool.num_heads, pool.head_dim, pool.dtype, TILE_BYTES)
        table = pointer_table([*k_buffers, *v_buffers])
        grid = (2 * pool.num_layers, pool.num_heads, num_nodes)
        indices = slots.contiguous(), survivors.contiguous()
        _compact_kernel[grid](table, *indices, slots.shape[1], num_kept, **constants)


def _as_nodes(slots: Tensor, survivors: Tensor) -> tuple[Tensor, Tensor]:
    one = slots.dim() == 1 and survivors.dim() == 3
    return (slots.unsqueeze(0), survivors.unsqueeze(2)) if one else (slots, survivors)


def compact_torch(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, survivors: Tensor) -> None:
    """Reference of ``compact``, and its CPU path: scratch is the survivors of one layer."""
    slots, survivors = _as_nodes(slots, survivors)
    num_nodes, num_slots = slots.shape
    num_heads, num_kept = survivors.shape[1], survivors.shape[-1]
    heads = torch.arange(num_heads, device=slots.device)[:, None, None]
    begins = torch.arange(num_nodes, device=slots.device)[:, None] * num_slots
    targets, every = slots[:, :num_kept].flatten(), slots.flatten()
    for layer, kept in enumerate(survivors):
        rows = (every[kept + begins] * num_heads + heads).permute(1, 2, 0).flatten()
        for buffer in (k_buffers[layer], v_buffers[layer]):
            moved = buffer.flatten(0, 1).index_select(0, rows)
            buffer.index_copy_(0, targets, moved.view(-1, *buffer.shape[1:]))
