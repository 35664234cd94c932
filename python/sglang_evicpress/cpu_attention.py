"""Attention over a paged KV pool on the CPU that computes only the new queries.

SGLang's torch_native backend runs scaled dot product attention over the whole sequence and throws the prefix rows away;
here a prefill over a cached prefix costs (new tokens x all tokens) instead of (all x all). Pure torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: ``slots`` int64 [kv_len] of all its KV, ``num_queries`` new tokens at its end."""

    slots: torch.Tensor
    num_queries: int


def batch_rows(
    req_to_token: torch.Tensor, rows: Sequence[int], kv_lens: Sequence[int], num_queries: Sequence[int]
) -> list[SequenceRows]:
    """Read the slots of a batch once per forward pass. ``req_to_token``: [requests, context], compact rows."""
    return [
        SequenceRows(req_to_token[row, :kv_len].to(torch.int64), queries)
        for row, kv_len, queries in zip(rows, kv_lens, num_queries, strict=True)
    ]


def causal_mask(num_queries: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Bool [num_queries, kv_len], aligned at the end: query i sees the first kv_len - num_queries + i + 1 entries."""
    return torch.ones((num_queries, kv_len), dtype=torch.bool, device=device).tril(kv_len - num_queries)


def paged_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    batch: Sequence[SequenceRows],
    scale: float,
) -> None:
    """Write the attention of ``query`` [tokens, q_heads, head_dim] into ``output`` [tokens, q_heads, v_head_dim].

    ``k_buffer``/``v_buffer``: [slots, kv_heads, head_dim]; the sequences of ``batch`` lie one after another in
    ``query``. The q heads of one kv head (GQA) are folded into the query axis, so keys are never repeated.
    """
    kv_heads = k_buffer.shape[1]
    begin = 0
    for sequence in batch:
        new = sequence.num_queries
        q = query[begin : begin + new]
        # [new, kv_heads, group, dim] -> [kv_heads, group * new, dim]
        q = q.view(new, kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3).reshape(kv_heads, -1, q.shape[-1])
        k = k_buffer.index_select(0, sequence.slots).to(query.dtype).transpose(0, 1)  # a fifth of the time of [slots]
        v = v_buffer.index_select(0, sequence.slots).to(query.dtype).transpose(0, 1)
        mask = None
        if new > 1:
            mask = causal_mask(new, k.shape[1], query.device).repeat(q.shape[1] // new, 1)
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
        out = out.view(kv_heads, -1, new, out.shape[-1]).permute(2, 0, 1, 3)
        output[begin : begin + new] = out.reshape(new, -1, out.shape[-1])
        begin += new
