"""In-place compaction with few copies: survivors from behind go, per layer and head, into dropped slots in front."""

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

TILE_BYTES = 8192  # what one program keeps in flight


@triton.jit(do_not_specialize=["num_moves"])
def _fill_holes_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    targets: tl.tensor,
    sources: tl.tensor,
    num_moves: tl.tensor,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # table holds the layers of K, then those of V. No slot is both read and written, so that programs and warps
    # need no order among themselves.
    index = tl.program_id(0)
    head = tl.program_id(1)
    rows = layer_pointer(table, index, DTYPE)
    first = ((index % NUM_LAYERS) * NUM_HEADS + head).to(tl.int64) * num_moves
    moves = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = moves < num_moves
    target = tl.load(targets + first + moves, mask=inside, other=-1)
    source = tl.load(sources + first + moves, mask=inside, other=-1)
    valid = target >= 0
    to = tl.load(slots + target, mask=valid, other=0).to(tl.int64)
    origin = tl.load(slots + source, mask=valid, other=0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    tile = tl.load(rows + (origin[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :], mask=mask, other=0)
    tl.store(rows + (to[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :], tile, mask=mask)


def fill_holes(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    targets: Tensor,
    sources: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Write the content of slot ``slots[sources[l, h, j]]`` into slot ``slots[targets[l, h, j]]`` for every layer
    l, head h and j with a target of 0 or more, in place and bit for bit; every other row keeps its bytes.

    ``targets`` and ``sources``: int32 ``[num_layers, num_heads, k]``; -1 in both says that there is no such move.
    In a head no target comes twice, and none is a source (not checked: that would wait for the device); ``slots``,
    int64 ``[n]``, holds no slot twice.
    Raises ValueError for shapes that do not fit, and as ``check_pool`` and ``runs_triton`` do.
    """
    pool = check_pools(k_buffers, v_buffers, slots)
    for moves in (targets, sources):
        if moves.dtype != torch.int32 or moves.dim() != 3 or moves.device != pool.device:
            raise ValueError(f"targets and sources must be int32 [layers, heads, k] on {pool.device}")
    if targets.shape != sources.shape or targets.shape[:2] != (pool.num_layers, pool.num_heads):
        raise ValueError(
            f"targets {tuple(targets.shape)} and sources {tuple(sources.shape)} do not fit {pool.num_layers} layers "
            f"of {pool.num_heads} heads"
        )
    num_moves = targets.shape[-1]
    if not runs_triton(backend, pool.device):
        fill_holes_torch(k_buffers, v_buffers, slots, targets, sources)
    elif num_moves:
        constants = move_constants(pool.num_layers, pool.num_heads, pool.head_dim, pool.dtype, TILE_BYTES)
        table = pointer_table([*k_buffers, *v_buffers])
        grid = (2 * pool.num_layers, pool.num_heads, triton.cdiv(num_moves, constants["BLOCK_TOKENS"]))
        indices = targets.contiguous(), sources.contiguous()
        _fill_holes_kernel[grid](table, slots.contiguous(), *indices, num_moves, **constants)


def fill_holes_torch(
    k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, targets: Tensor, sources: Tensor
) -> None:
    """Reference of ``fill_holes``, and its CPU path: scratch is the moved rows of one layer. Waits for the device."""
    num_heads = targets.shape[1]
    for layer, (into, out_of) in enumerate(zip(targets, sources, strict=True)):
        head, move = (into >= 0).nonzero(as_tuple=True)
        to = slots[into[head, move].long()] * num_heads + head
        origin = slots[out_of[head, move].long()] * num_heads + head
        for buffer in (k_buffers[layer], v_buffers[layer]):
            rows = buffer.flatten(0, 1)
            rows.index_copy_(0, to, rows.index_select(0, origin))
