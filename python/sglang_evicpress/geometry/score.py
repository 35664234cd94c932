"""Scores of keys in a paged pool by the geometry of queries; no attention is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.kernels.pool import check_pool, gather_layer

_LEAST_DEVIATION = 1e-12  # of scores that are all alike


def expected_queries(geometry: QueryGeometry, last: Tensor) -> Tensor:
    """fp32 [layers, R, heads, head_dim]: the mean query with RoPE of those that come ``geometry.offsets`` tokens after
    the positions ``last`` (int64 [R])."""
    rope = geometry.rope
    turning, still = rope.split(geometry.centres)
    turns = rope.turns(geometry.offsets).mean(0) * rope.turns(last) * rope.factor  # [R, F]
    moved = turning[:, None] * turns.to(turning.dtype)[None, :, None]
    return rope.join(moved, still[:, None].expand(-1, len(last), -1, -1))


def geometry_scores(geometry: QueryGeometry, k_buffers: Sequence[Tensor], slots: Tensor, last: Tensor) -> Tensor:
    """Score of every key by the queries to be expected: fp32 [layers, kv_heads, R, n], the higher is asked for more
    (after TriAttention, arXiv 2604.04921: pre-RoPE geometry, learned offline per head).

    Queries of a head before RoPE gather about a centre E[q], so what a key at distance d of them can expect is a series
    of one cosine per band f, ``sum |E[q_f]| |k_f| cos(w_f d + arg E[q_f] - arg k_f)``. Its mean over the distances
    ``geometry.offsets`` from ``last`` on is a product of the key, as it is cached, with one mean query. What queries
    have besides their centre counts by lengths alone, ``sum (E|q_f| - |E[q_f]|) |k_f|``. Both are added, brought to
    mean 0 and deviation 1 over the slots of a row for every query head, and a KV head takes the greatest of its group.

    ``k_buffers``: one [num_slots, kv_heads, head_dim] per layer, RoPE in the keys; ``slots``: int64 [R, n]; ``last``:
    int64 [R], the newest position of each row. Raises ValueError as ``check_pool``, and where layers or heads are not
    those of ``geometry``.
    """
    pool, facts = check_pool(k_buffers, slots.flatten()), geometry.model
    found, wanted = (
        (pool.num_layers, pool.num_heads, pool.head_dim),
        (facts.num_layers, facts.num_kv_heads, facts.head_dim),
    )
    if found != wanted:
        raise ValueError(f"a pool of (layers, KV heads, head_dim) {found}: expected {wanted}, those of the geometry")
    num_rows, num_slots = slots.shape
    queries, spread = expected_queries(geometry, last), geometry.spread
    lengthen = torch.ones(geometry.rope.num_bands, device=slots.device)
    lengthen[: geometry.rope.num_turning] = geometry.rope.factor
    scores = []
    for layer, buffer in enumerate(k_buffers):
        keys = gather_layer(buffer, slots.flatten()).view(num_rows, num_slots, pool.num_heads, -1).transpose(1, 2)
        group = queries[layer].view(num_rows, pool.num_heads, -1, pool.head_dim)
        besides = (spread[layer] * lengthen).view(pool.num_heads, -1, geometry.rope.num_bands)
        expected = group @ keys.transpose(2, 3) + besides @ geometry.rope.lengths(keys).transpose(2, 3)
        expected = expected - expected.mean(-1, keepdim=True)
        deviation = expected.square().mean(-1, keepdim=True).sqrt().clamp_min(_LEAST_DEVIATION)
        scores.append((expected / deviation).amax(2))
    return torch.stack(scores).transpose(1, 2).contiguous()
