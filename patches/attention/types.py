"""Narrow types of SGLang's model runner and of the batches that attention sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class ForwardMode(Protocol):
    """Kind of a forward pass."""

    def is_extend(self, *, include_draft_extend_v2: bool = False) -> bool: ...


class AttentionLayer(Protocol):
    """SGLang's RadixAttention."""

    layer_id: int
    tp_q_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float


class ForwardBatch(Protocol):
    """SGLang's ForwardBatch; ``is_physical_view``: ours, with the lengths of compact rows."""

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    extend_prefix_lens: torch.Tensor
    extend_prefix_lens_cpu: Sequence[int]
    extend_seq_lens_cpu: Sequence[int]
    out_cache_loc: torch.Tensor
    is_physical_view: bool


class KVPool(Protocol):
    """SGLang's MHATokenToKVPool."""

    size: int
    layer_num: int
    start_layer: int
    head_num: int
    head_dim: int
    store_dtype: torch.dtype
    device: str


class RowPool(Protocol):
    """SGLang's ReqToTokenPool: ``req_to_token`` [rows, context] are the slots of each row."""

    req_to_token: torch.Tensor


class ModelConfig(Protocol):
    """SGLang's ModelConfig."""

    num_attention_heads: int


class AttentionBackend(Protocol):
    """SGLang's AttentionBackend, whose methods are wrapped."""

    forward_extend: Callable[..., torch.Tensor]
    forward_decode: Callable[..., torch.Tensor]
    init_forward_metadata: Callable[..., None]
    prefill_attention_backend_str: str
    decode_attention_backend_str: str


class ModelRunner(Protocol):
    """SGLang's ModelRunner."""

    server_args: object
    model_config: ModelConfig
    token_to_kv_pool: KVPool
    req_to_token_pool: RowPool
    attn_backend: AttentionBackend
    dtype: torch.dtype
    is_draft_worker: bool
    kv_index_translator: RowPool
