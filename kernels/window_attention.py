"""Attention that a window of recent queries pays to the tokens of a node, in two passes over the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.kernels.pool import (
    IS_INTERPRETED,
    TRITON_DTYPES,
    Backend,
    PoolShape,
    block_dim,
    check_pool,
    gather_layer,
    layer_pointer,
    load_rows,
    pointer_table,
    runs_triton,
    tile_constants,
)

CHUNK_TOKENS = 1024  # tokens over which one program of the first pass sums
MAX_WINDOW = 256
_TILE_ROWS = 128  # queries x heads of a group that share one load of the keys


@triton.jit
def _load_queries(
    queries: tl.tensor,
    query_positions: tl.tensor,
    plane: tl.tensor,
    first_head: tl.tensor,
    num_heads_here: tl.tensor,
    num_queries: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    # Row r is query r % BLOCK_QUERIES of head first_head + r // BLOCK_QUERIES. Padding, at -1, sees no key.
    # A plane is one layer of one node.
    row = tl.arange(0, BLOCK_GROUP * BLOCK_QUERIES)
    dims = tl.arange(0, BLOCK_DIM)
    head = row // BLOCK_QUERIES
    query = row % BLOCK_QUERIES
    valid = (head < num_heads_here) & (query < num_queries)
    position = tl.load(query_positions + query, mask=valid, other=-1)
    offset = ((plane * num_queries + query) * QUERY_HEADS + first_head + head).to(tl.int64) * HEAD_DIM
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tl.load(queries + offset[:, None] + dims[None, :], mask=mask, other=0.0)
    return rows.to(DTYPE).to(DOT_DTYPE), position, valid


@triton.jit
def _window_logits(
    query: tl.tensor,
    position: tl.tensor,
    keys: tl.tensor,
    slots: tl.tensor,
    key_positions: tl.tensor,
    tokens: tl.tensor,
    num_tokens: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    inside = tokens < num_tokens
    key = load_rows(keys, slots, tokens, inside, kv_head, NUM_HEADS, HEAD_DIM, BLOCK_DIM)
    logits = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="ieee") * scale
    key_position = tl.load(key_positions + tokens, mask=inside, other=0)
    visible = inside[None, :] & (key_position[None, :] <= position[:, None])
    return tl.where(visible, logits, float("-inf")), visible


@triton.jit(do_not_specialize=["num_queries", "num_tokens", "num_nodes"])
def _window_normalizer_kernel(
    queries: tl.tensor,
    k_table: tl.tensor,
    slots: tl.tensor,
    query_positions: tl.tensor,
    key_positions: tl.tensor,
    out: tl.tensor,
    num_queries: tl.tensor,
    num_tokens: tl.tensor,
    num_nodes: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    # out[layer, query head, node, query, chunk] = log of the sum of exp(logit) over the chunk
    group: tl.constexpr = QUERY_HEADS // NUM_HEADS
    blocks: tl.constexpr = (group + BLOCK_GROUP - 1) // BLOCK_GROUP
    chunk = tl.program_id(0)
    layer = tl.program_id(2) // num_nodes
    node = tl.program_id(2) % num_nodes
    slots += node.to(tl.int64) * num_tokens
    query_positions += node * num_queries
    kv_head = tl.program_id(1) // blocks
    group_start = tl.program_id(1) % blocks * BLOCK_GROUP
    first_head = kv_head * group + group_start
    query, position, valid = _load_queries(
        queries, query_positions, tl.program_id(2), first_head, group - group_start, num_queries,
        QUERY_HEADS, HEAD_DIM, DTYPE, DOT_DTYPE, BLOCK_GROUP, BLOCK_QUERIES, BLOCK_DIM,
    )  # fmt: skip
    keys = layer_pointer(k_table, layer, DTYPE)
    key_positions += ((layer * NUM_HEADS + kv_head) * num_nodes + node).to(tl.int64) * num_tokens
    peak = tl.full([BLOCK_GROUP * BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP * BLOCK_QUERIES], tl.float32)
    for start in range(0, CHUNK, BLOCK_TOKENS):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK_TOKENS)
        logits, _ = _window_logits(
            query, position, keys, slots, key_positions, tokens, num_tokens, kv_head, scale,
            NUM_HEADS, HEAD_DIM, DOT_DTYPE, BLOCK_DIM,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        peak = new_peak
    row = tl.arange(0, BLOCK_GROUP * BLOCK_QUERIES)
    head = first_head + row // BLOCK_QUERIES
    entry = (((layer * QUERY_HEADS + head) * num_nodes + node) * num_queries + row % BLOCK_QUERIES).to(tl.int64)
    # A row that saw no key has peak -inf and total 0: its logarithm is -inf, without taking that of 0.
    logarithm = peak + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(out + entry * tl.num_programs(0) + chunk, logarithm, mask=valid)


@triton.jit(do_not_specialize=["num_queries", "num_tokens", "num_nodes"])
def _window_attention_kernel(
    queries: tl.tensor,
    k_table: tl.tensor,
    slots: tl.tensor,
    query_positions: tl.tensor,
    key_positions: tl.tensor,
    normalizers: tl.tensor,
    out: tl.tensor,
    num_queries: tl.tensor,
    num_tokens: tl.tensor,
    num_nodes: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    group: tl.constexpr = QUERY_HEADS // NUM_HEADS
    blocks: tl.constexpr = (group + BLOCK_GROUP - 1) // BLOCK_GROUP
    layer = tl.program_id(2) // num_nodes
    node = tl.program_id(2) % num_nodes
    slots += node.to(tl.int64) * num_tokens
    query_positions += node * num_queries
    kv_head = tl.program_id(1) // blocks
    group_start = tl.program_id(1) % blocks * BLOCK_GROUP
    first_head = kv_head * group + group_start
    query, position, valid = _load_queries(
        queries, query_positions, tl.program_id(2), first_head, group - group_start, num_queries,
        QUERY_HEADS, HEAD_DIM, DTYPE, DOT_DTYPE, BLOCK_GROUP, BLOCK_QUERIES, BLOCK_DIM,
    )  # fmt: skip
    row = tl.arange(0, BLOCK_GROUP * BLOCK_QUERIES)
    head = first_head + row // BLOCK_QUERIES
    offset = ((layer * QUERY_HEADS + head) * num_nodes + node) * num_queries + row % BLOCK_QUERIES
    normalizer = tl.load(normalizers + offset, mask=valid, other=0.0)
    normalizer = tl.where(normalizer == float("-inf"), 0.0, normalizer)
    keys = layer_pointer(k_table, layer, DTYPE)
    key_positions += ((layer * NUM_HEADS + kv_head) * num_nodes + node).to(tl.int64) * num_tokens
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    logits, visible = _window_logits(
        query, position, keys, slots, key_positions, tokens, num_tokens, kv_head, scale,
        NUM_HEADS, HEAD_DIM, DOT_DTYPE, BLOCK_DIM,
    )  # fmt: skip
    attention = tl.where(visible, tl.exp(logits - normalizer[:, None]), 0.0)
    mean = tl.sum(tl.reshape(attention, [BLOCK_GROUP, BLOCK_QUERIES, BLOCK_TOKENS]), 1) / num_queries
    heads = tl.arange(0, BLOCK_GROUP)
    target = ((layer * QUERY_HEADS + first_head + heads) * num_nodes + node).to(tl.int64)
    target = target[:, None] * num_tokens + tokens[None, :]
    mask = (heads < group - group_start)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out + target, mean, mask=mask)


def window_attention(
    queries: Tensor,
    k_buffers: Sequence[Tensor],
    slots: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Softmax of the window's queries over the node's keys alone, averaged over the window: float32
    ``[num_layers, num_query_heads, n]`` (SnapKV, Li et al. 2024, section 4.1, before pooling).

    ``queries``: ``[num_layers, W, num_query_heads, head_dim]``, rotated, W <= 256, taken in the dtype of the
    pool; ``slots``: int64 ``[n]``; ``query_positions``: int64 ``[W]``; ``key_positions``: int32 or int64
    ``[num_layers, num_heads, n]``, none negative; ``scale``: factor on the logits, ``head_dim ** -0.5`` as a
    rule. A query sees the keys at positions up to its own; one that sees none adds 0 and counts in the mean.
    Query head q reads kv head ``q // (num_query_heads // num_heads)``. R nodes of n slots at once: ``queries``
    ``[num_layers, R, W, num_query_heads, head_dim]``, ``slots`` ``[R, n]``, ``query_positions`` ``[R, W]``,
    ``key_positions`` ``[num_layers, num_heads, R, n]``, and the result ``[num_layers, num_query_heads, R, n]``.
    Raises ValueError for shapes that do not fit, and as ``check_pool`` and ``runs_triton`` do.
    """
    if slots.dim() == 1:
        if queries.dim() != 4:
            raise ValueError(f"queries is {tuple(queries.shape)}: expected [layers, W, query heads, head_dim]")
        _check_window(check_pool(k_buffers, slots), queries, slots, query_positions, key_positions)
        one = slots.unsqueeze(0), query_positions.unsqueeze(0), key_positions.unsqueeze(2)
        return window_attention(queries.unsqueeze(1), k_buffers, *one, scale, backend=backend).squeeze(2)
    pool = check_pool(k_buffers, slots.flatten())
    num_nodes = len(slots)
    nodes = queries.shape[1], len(query_positions), key_positions.shape[2]
    if queries.dim() != 5 or num_nodes == 0 or set(nodes) != {num_nodes}:
        raise ValueError(
            f"queries {tuple(queries.shape)}, query_positions {tuple(query_positions.shape)} and key_positions "
            f"{tuple(key_positions.shape)} do not fit {len(slots)} nodes"
        )
    _check_window(pool, queries[:, 0], slots[0], query_positions[0], key_positions[:, :, 0])
    if not runs_triton(backend, pool.device):
        parts = zip(queries.unbind(1), slots, query_positions, key_positions.unbind(2), strict=True)
        made = [window_attention_torch(query, k_buffers, each, at, keys, scale) for query, each, at, keys in parts]
        return torch.stack(made, 2)
    layers, _, window, query_heads, _ = queries.shape
    n = slots.shape[-1]
    out = torch.empty(layers, query_heads, num_nodes, n, dtype=torch.float32, device=pool.device)
    if not n:
        return out
    constants = window_constants(window, query_heads, pool.num_heads, pool.head_dim, pool.dtype)
    groups = pool.num_heads * triton.cdiv(query_heads // pool.num_heads, constants["BLOCK_GROUP"])
    positions = query_positions.contiguous(), key_positions.contiguous()
    inputs = (queries.contiguous(), pointer_table(k_buffers), slots.contiguous(), *positions)
    chunks = triton.cdiv(n, CHUNK_TOKENS)
    partial = torch.empty(layers, query_heads, num_nodes, window, chunks, dtype=torch.float32, device=pool.device)
    sizes = window, n, num_nodes, float(scale)
    _window_normalizer_kernel[(chunks, groups, layers * num_nodes)](
        *inputs, partial, *sizes, CHUNK=CHUNK_TOKENS, **constants
    )
    normalizers = torch.logsumexp(partial, dim=-1)
    grid = (triton.cdiv(n, constants["BLOCK_TOKENS"]), groups, layers * num_nodes)
    _window_attention_kernel[grid](*inputs, normalizers, out, *sizes, **constants)
    return out


def window_constants(
    window: int, query_heads: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, object]:
    """Launch constants of both passes: as many heads of a group as fit share one load of the keys."""
    rows = max(16, triton.next_power_of_2(window))
    group = min(triton.next_power_of_2(query_heads // num_heads), max(1, _TILE_ROWS // rows))
    constants = tile_constants(num_heads, head_dim, dtype)
    # The interpreter of Triton 3.6 multiplies the bits of bfloat16: there, and only there, use float32.
    constants["DOT_DTYPE"] = tl.float32 if IS_INTERPRETED else TRITON_DTYPES[dtype]
    constants |= {"QUERY_HEADS": query_heads, "BLOCK_GROUP": group, "BLOCK_QUERIES": rows}
    return constants | {"BLOCK_TOKENS": 64 if block_dim(head_dim) <= 128 else 32, "num_warps": 8}


def _check_window(
    pool: PoolShape, queries: Tensor, slots: Tensor, query_positions: Tensor, key_positions: Tensor
) -> None:
    if queries.dim() != 4 or queries.shape[0] != pool.num_layers or queries.shape[3] != pool.head_dim:
        raise ValueError(f"queries is {tuple(queries.shape)}: expected [layers, W, query heads, head_dim]")
    window, query_heads = queries.shape[1:3]
    if query_heads == 0 or query_heads % pool.num_heads:
        raise ValueError(f"{query_heads} query heads do not divide over {pool.num_heads} kv heads")
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"the window has {window} queries: expected 1 to {MAX_WINDOW}")
    if query_positions.shape != (window,) or query_positions.dtype != torch.int64:
        raise ValueError(f"query_positions must be int64 [{window}]")
    expected = (pool.num_layers, pool.num_heads, slots.numel())
    if key_positions.shape != expected or key_positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"key_positions is {tuple(key_positions.shape)}: expected int32 or int64 {expected}")
    if {queries.device, query_positions.device, key_positions.device} != {pool.device}:
        raise ValueError(f"queries and positions must be on {pool.device}")


def window_attention_torch(
    queries: Tensor,
    k_buffers: Sequence[Tensor],
    slots: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
) -> Tensor:
    """Reference of ``window_attention``, and its CPU path: one product ``[heads, group * W, n]`` a layer."""
    _, window, query_heads, head_dim = queries.shape
    num_heads, n = key_positions.shape[1:]
    rows = query_heads // num_heads * window
    out = torch.empty(len(k_buffers), query_heads, n, dtype=torch.float32, device=queries.device)
    for layer, buffer in enumerate(k_buffers):
        keys = gather_layer(buffer, slots).permute(1, 2, 0)
        query = queries[layer].to(buffer.dtype).float().transpose(0, 1).reshape(num_heads, rows, head_dim)
        logits = (query @ keys).mul_(scale).view(num_heads, rows // window, window, n)
        hidden = key_positions[layer].unsqueeze(1) > query_positions.unsqueeze(-1)
        attention = logits.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
        # A query that sees no key has a softmax of NaN: it must add nothing.
        out[layer] = attention.masked_fill_(hidden.unsqueeze(1), 0.0).mean(2).flatten(0, 1)
    return out
