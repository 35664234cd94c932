"""Redundancy of a key: its mean cosine with recent keys, without an n x W matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.kernels.pool import (
    Backend,
    check_pool,
    gather_layer,
    layer_pointer,
    load_rows,
    pointer_table,
    runs_triton,
    tile_constants,
)


@triton.jit
def _directions(keys: tl.tensor) -> tl.tensor:
    # Keys of length one, those of length zero as they are.
    keys = keys.to(tl.float32)
    return keys / tl.maximum(tl.sqrt(tl.sum(keys * keys, 1)), 1e-12)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "num_recent", "num_nodes"])
def _recent_direction_kernel(
    k_table: tl.tensor,
    slots: tl.tensor,
    recent: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_recent: tl.tensor,
    num_nodes: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # out[layer, head, node, :] = mean of key / |key| over the head's recent tokens
    head = tl.program_id(0)
    layer = tl.program_id(1) // num_nodes
    node = tl.program_id(1) % num_nodes
    slots += node.to(tl.int64) * num_tokens
    keys = layer_pointer(k_table, layer, DTYPE)
    row = ((layer * NUM_HEADS + head) * num_nodes + node).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    for start in range(0, num_recent, BLOCK_TOKENS):
        entry = start + tl.arange(0, BLOCK_TOKENS)
        inside = entry < num_recent
        token = tl.load(recent + row * num_recent + entry, mask=inside, other=0)
        total += tl.sum(_directions(load_rows(keys, slots, token, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM)), 0)
    tl.store(out + row * HEAD_DIM + dims, total / num_recent, mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens", "num_nodes"])
def _redundancy_kernel(
    k_table: tl.tensor,
    slots: tl.tensor,
    anchors: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_nodes: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = tokens < num_tokens
    head = tl.program_id(0)
    layer = tl.program_id(2) // num_nodes
    node = tl.program_id(2) % num_nodes
    slots += node.to(tl.int64) * num_tokens
    keys = layer_pointer(k_table, layer, DTYPE)
    row = ((layer * NUM_HEADS + head) * num_nodes + node).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    anchor = tl.load(anchors + row * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    direction = _directions(load_rows(keys, slots, tokens, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM))
    tl.store(out + row * num_tokens + tokens, tl.sum(direction * anchor[None, :], 1), mask=inside)


def redundancy(k_buffers: Sequence[Tensor], slots: Tensor, recent: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Mean cosine of every key with the recent keys of its head, itself included if it is one: float32
    ``[num_layers, num_heads, n]`` in [-1, 1] (after R-KV, Cai et al. 2025, arXiv 2505.24133, which compares every
    key with every other).

    ``k_buffers``: one ``[num_slots, num_heads, head_dim]`` per layer; ``slots``: int64 ``[n]``; ``recent``: int32
    ``[num_layers, num_heads, W]``, indices into ``slots``, W at least 1 unless n is 0. The mean of the cosines is
    the product with the mean direction: scratch is one direction per head. A key of norm 0 has cosine 0. R nodes of n
    slots at once: ``slots`` ``[R, n]``, ``recent`` ``[num_layers, num_heads, R, W]``, indices within each node, and the
    result ``[num_layers, num_heads, R, n]``.
    Raises ValueError for shapes that do not fit, and as ``check_pool`` and ``runs_triton`` do.
    """
    if slots.dim() == 1 and recent.dim() == 3:
        return redundancy(k_buffers, slots.unsqueeze(0), recent.unsqueeze(2), backend=backend).squeeze(2)
    pool = check_pool(k_buffers, slots.flatten())
    layers, heads, n = pool.num_layers, pool.num_heads, slots.shape[-1]
    if recent.dtype != torch.int32 or recent.dim() != 4 or slots.dim() != 2 or recent.device != pool.device:
        raise ValueError(f"recent must be int32 [layers, heads, W], or [layers, heads, nodes, W], on {pool.device}")
    num_nodes, num_recent = recent.shape[2:]
    fits = (*recent.shape[:2], num_nodes) == (layers, heads, len(slots))
    if not fits or num_recent > n or (n and not num_recent):
        raise ValueError(f"recent {tuple(recent.shape)} does not fit {layers} layers of {heads} heads and {n} slots")
    if not runs_triton(backend, pool.device):
        pairs = zip(slots, recent.unbind(2), strict=True)
        return torch.stack([redundancy_torch(k_buffers, each, chosen) for each, chosen in pairs], 2)
    out = torch.empty(layers, heads, num_nodes, n, dtype=torch.float32, device=pool.device)
    if not n or not num_nodes:
        return out
    table, slots = pointer_table(k_buffers), slots.contiguous()
    constants = tile_constants(heads, pool.head_dim, pool.dtype)
    anchors = torch.empty(layers, heads, num_nodes, pool.head_dim, dtype=torch.float32, device=pool.device)
    chosen = recent.contiguous()
    _recent_direction_kernel[(heads, layers * num_nodes)](
        table, slots, chosen, anchors, n, num_recent, num_nodes, **constants
    )
    grid = (heads, triton.cdiv(n, constants["BLOCK_TOKENS"]), layers * num_nodes)
    _redundancy_kernel[grid](table, slots, anchors, out, n, num_nodes, **constants)
    return out


def redundancy_torch(k_buffers: Sequence[Tensor], slots: Tensor, recent: Tensor) -> Tensor:
    """Reference of ``redundancy``, and its CPU path: one gathered layer at a time."""
    scores = []
    for buffer, chosen in zip(k_buffers, recent, strict=True):
        directions = F.normalize(gather_layer(buffer, slots).transpose(0, 1), dim=-1, eps=1e-12)
        index = chosen.long().unsqueeze(-1).expand(-1, -1, directions.shape[-1])
        anchor = directions.gather(1, index).mean(1)
        scores.append(torch.bmm(directions, anchor.unsqueeze(-1)).squeeze(-1))
    return torch.stack(scores)
