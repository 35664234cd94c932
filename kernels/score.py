"""Token scores over a paged KV pool: key norm, value to key ratio, key difference, and their mean over pages.

Heads come first in a grid: programs that run side by side read the heads of the same rows, which lie side by side.
All results are float32 ``[num_layers, num_heads, n]``. Norms are accumulated in float32: a row whose squared
norm exceeds 3.4e38 has an infinite norm, as in torch.
"""

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
    check_pools,
    gather_layer,
    layer_pointer,
    load_rows,
    pointer_table,
    runs_triton,
    tile_constants,
)

CHUNK_TOKENS = 512  # tokens that one program of the anchor's first pass adds up
DIFFERENCE_TILE = 8192  # elements of a tile of both passes
PAGE_TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_tokens"])
def _key_norm_kernel(
    k_table: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    layer = tl.program_id(2)
    inside = tokens < num_tokens
    keys = layer_pointer(k_table, layer, DTYPE)
    key = load_rows(keys, slots, tokens, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM).to(tl.float32)
    row = (layer * NUM_HEADS + head).to(tl.int64) * num_tokens
    tl.store(out + row + tokens, tl.sqrt(tl.sum(key * key, 1)), mask=inside)


def key_norm(k_buffers: Sequence[Tensor], slots: Tensor, *, backend: Backend = "auto") -> Tensor:
    """L2 norm of every key: float32 ``[num_layers, num_heads, n]`` (Devoto et al. 2024, "A Simple and
    Effective L2 Norm-Based Strategy for KV Cache Compression").

    ``k_buffers``: one ``[num_slots, num_heads, head_dim]`` per layer; ``slots``: int64 ``[n]``.
    Raises ValueError as ``check_pool`` and ``runs_triton`` do.
    """
    pool = check_pool(k_buffers, slots)
    if not runs_triton(backend, pool.device):
        return key_norm_torch(k_buffers, slots)
    n = slots.numel()
    out = torch.empty(pool.num_layers, pool.num_heads, n, dtype=torch.float32, device=pool.device)
    constants = tile_constants(pool.num_heads, pool.head_dim, pool.dtype)
    if n:
        grid = (pool.num_heads, triton.cdiv(n, constants["BLOCK_TOKENS"]), pool.num_layers)
        _key_norm_kernel[grid](pointer_table(k_buffers), slots.contiguous(), out, n, **constants)
    return out


def key_norm_torch(k_buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """Reference of ``key_norm``, and its CPU path: one gathered layer at a time."""
    return torch.stack([torch.linalg.vector_norm(gather_layer(b, slots), dim=-1).T for b in k_buffers])


@triton.jit(do_not_specialize=["num_tokens"])
def _value_key_ratio_kernel(
    k_table: tl.tensor,
    v_table: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    layer = tl.program_id(2)
    keys = layer_pointer(k_table, layer, DTYPE)
    values = layer_pointer(v_table, layer, DTYPE)
    inside = tokens < num_tokens
    key = load_rows(keys, slots, tokens, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM).to(tl.float32)
    value = load_rows(values, slots, tokens, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM).to(tl.float32)
    ratio = tl.sqrt(tl.sum(value * value, 1)) / tl.maximum(
        tl.sqrt(tl.sum(key * key, 1)), 1e-6, propagate_nan=tl.PropagateNan.ALL
    )
    row = (layer * NUM_HEADS + head).to(tl.int64) * num_tokens
    tl.store(out + row + tokens, ratio, mask=inside)


def value_key_ratio(
    k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """Norm of the value over the norm of the key, at least 1e-6: float32 ``[num_layers, num_heads, n]``
    (PagedEviction, algorithm 1).

    Raises ValueError as ``check_pool`` and ``runs_triton`` do, and when K and V differ in shape.
    """
    pool = check_pools(k_buffers, v_buffers, slots)
    if not runs_triton(backend, pool.device):
        return value_key_ratio_torch(k_buffers, v_buffers, slots)
    n = slots.numel()
    out = torch.empty(pool.num_layers, pool.num_heads, n, dtype=torch.float32, device=pool.device)
    constants = tile_constants(pool.num_heads, pool.head_dim, pool.dtype)
    if n:
        grid = (pool.num_heads, triton.cdiv(n, constants["BLOCK_TOKENS"]), pool.num_layers)
        tables = pointer_table(k_buffers), pointer_table(v_buffers)
        _value_key_ratio_kernel[grid](*tables, slots.contiguous(), out, n, **constants)
    return out


def value_key_ratio_torch(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """Reference of ``value_key_ratio``, and its CPU path."""
    return key_norm_torch(v_buffers, slots) / key_norm_torch(k_buffers, slots).clamp_min_(1e-6)


@triton.jit(do_not_specialize=["num_tokens", "num_nodes"])
def _direction_sum_kernel(
    k_table: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_nodes: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    # out[layer, head, node, chunk, :] = sum over the chunk's tokens of key / |key|
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    layer = tl.program_id(2) // num_nodes
    node = tl.program_id(2) % num_nodes
    slots += node.to(tl.int64) * num_tokens
    keys = layer_pointer(k_table, layer, DTYPE)
    dims = tl.arange(0, BLOCK_DIM)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_DIM], tl.float32)  # added up at the end: a sum over tokens crosses warps
    for start in range(0, CHUNK, BLOCK_TOKENS):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK_TOKENS)
        inside = tokens < num_tokens
        key = load_rows(keys, slots, tokens, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(key * key, 1)), 1e-12)
        total += key * (1.0 / norm)[:, None]
    row = ((layer * NUM_HEADS + head) * num_nodes + node).to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(out + row * HEAD_DIM + dims, tl.sum(total, 0), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens", "num_nodes"])
def _key_difference_kernel(
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
    head = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    layer = tl.program_id(2) // num_nodes
    node = tl.program_id(2) % num_nodes
    slots += node.to(tl.int64) * num_tokens
    dims = tl.arange(0, BLOCK_DIM)
    row = ((layer * NUM_HEADS + head) * num_nodes + node).to(tl.int64)
    anchor = tl.load(anchors + row * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    anchor_norm = tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-8)
    inside = tokens < num_tokens
    keys = layer_pointer(k_table, layer, DTYPE)
    key = load_rows(keys, slots, tokens, inside, head, NUM_HEADS, HEAD_DIM, BLOCK_DIM).to(tl.float32)
    key_norm = tl.maximum(tl.sqrt(tl.sum(key * key, 1)), 1e-8)
    cosine = tl.sum(key * anchor[None, :], 1) / (key_norm * anchor_norm)
    tl.store(out + row * num_tokens + tokens, -cosine, mask=inside)


def key_difference(k_buffers: Sequence[Tensor], slots: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Minus the cosine between a key and the anchor, the mean direction of the node's keys: float32
    ``[num_layers, num_heads, n]`` (KeyDiff, Park et al. 2025, section 3; kvpress 0.5.5 ``KeyDiffPress``).

    The clamps are torch's: 1e-12 on the norm that makes a direction, 1e-8 on each norm of the cosine. R nodes of n
    slots at once: ``slots`` ``[R, n]``, result ``[num_layers, num_heads, R, n]``, each with the anchor of its node.
    Raises ValueError as ``check_pool`` and ``runs_triton`` do.
    """
    if slots.dim() == 1:
        return key_difference(k_buffers, slots.unsqueeze(0), backend=backend).squeeze(2)
    pool = check_pool(k_buffers, slots.flatten())
    if not runs_triton(backend, pool.device):
        return torch.stack([key_difference_torch(k_buffers, each) for each in slots], 2)
    num_nodes, n = slots.shape
    heads, layers = pool.num_heads, pool.num_layers
    out = torch.empty(layers, heads, num_nodes, n, dtype=torch.float32, device=pool.device)
    if not n or not num_nodes:
        return out
    table, slots = pointer_table(k_buffers), slots.contiguous()
    constants = tile_constants(heads, pool.head_dim, pool.dtype, DIFFERENCE_TILE)
    chunks = triton.cdiv(n, CHUNK_TOKENS)
    sums = torch.empty(layers, heads, num_nodes, chunks, pool.head_dim, dtype=torch.float32, device=pool.device)
    grid = (heads, chunks, layers * num_nodes)
    _direction_sum_kernel[grid](table, slots, sums, n, num_nodes, CHUNK=CHUNK_TOKENS, **constants)
    anchors = sums.sum(3) / n
    grid = (heads, triton.cdiv(n, constants["BLOCK_TOKENS"]), layers * num_nodes)
    _key_difference_kernel[grid](table, slots, anchors, out, n, num_nodes, **constants)
    return out


def key_difference_torch(k_buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """Reference of ``key_difference``, and its CPU path: one product with the anchor per layer."""
    scores = []
    for buffer in k_buffers:
        keys = gather_layer(buffer, slots).transpose(0, 1)
        norms = torch.linalg.vector_norm(keys, dim=-1)
        weights = norms.clamp_min(1e-12).reciprocal_().unsqueeze(1)
        anchor = F.normalize(torch.bmm(weights, keys) / max(1, slots.numel()), dim=-1, eps=1e-8)
        cosine = torch.bmm(keys, anchor.transpose(1, 2)).squeeze(-1) / norms.clamp_min(1e-8)
        scores.append(cosine.neg_())
    return torch.stack(scores)


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def _page_mean_kernel(
    scores: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_pages: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_PAGE: tl.constexpr,
) -> None:
    pages = tl.program_id(0) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    row = tl.program_id(1).to(tl.int64)
    within = tl.arange(0, BLOCK_PAGE)
    tokens = pages[:, None] * PAGE + within[None, :]
    mask = (within < PAGE)[None, :] & (tokens < num_tokens)
    total = tl.sum(tl.load(scores + row * num_tokens + tokens, mask=mask, other=0.0), 1)
    count = tl.maximum(tl.minimum(num_tokens - pages * PAGE, PAGE), 1).to(tl.float32)
    tl.store(out + row * num_pages + pages, total / count, mask=pages < num_pages)


def page_mean(scores: Tensor, page_size: int, *, backend: Backend = "auto") -> Tensor:
    """Mean score of each page of ``page_size`` tokens, the last one possibly partial:
    float32 ``[num_layers, num_heads, n]`` -> ``[num_layers, num_heads, ceil(n / page_size)]``.

    Raises ValueError for a page size below 1 and as ``runs_triton`` does.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}: expected at least 1")
    if scores.dim() != 3 or scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype} {tuple(scores.shape)}: expected float32 [layers, heads, n]")
    if not runs_triton(backend, scores.device):
        return page_mean_torch(scores, page_size)
    layers, heads, n = scores.shape
    pages = triton.cdiv(n, page_size)
    out = torch.empty(layers, heads, pages, dtype=torch.float32, device=scores.device)
    constants = page_constants(page_size)
    if n:
        grid = (triton.cdiv(pages, constants["BLOCK_PAGES"]), layers * heads)
        _page_mean_kernel[grid](scores.contiguous(), out, n, pages, **constants)
    return out


def page_constants(page_size: int) -> dict[str, object]:
    """Launch constants of ``page_mean``: tiles of about 2,048 scores."""
    width = triton.next_power_of_2(page_size)
    rows = max(1, PAGE_TILE_ELEMENTS // width)
    return {"PAGE": page_size, "BLOCK_PAGES": rows, "BLOCK_PAGE": width, "num_warps": 4}


def page_mean_torch(scores: Tensor, page_size: int) -> Tensor:
    """Reference of ``page_mean``, and its CPU path."""
    n = scores.shape[-1]
    whole = n // page_size * page_size
    means = scores[..., :whole].reshape(*scores.shape[:-1], n // page_size, page_size).mean(-1)
    if whole == n:
        return means
    rest = scores[..., whole:].mean(-1, keepdim=True)
    return torch.cat([means, rest], dim=-1)
