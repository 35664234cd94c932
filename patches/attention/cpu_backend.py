"""CPU attention in the place of torch_native: computes only the new queries of a sequence, and reads compact rows.

Touches ``ModelRunner.init_attention_backends``.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.cpu_attention import SequenceRows, batch_rows, paged_attention
from sglang_evicpress.patches.attention.types import AttentionLayer, ForwardBatch, ModelRunner

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"


class SdpaBackend(TorchNativeAttnBackend):
    """torch_native for the CPU, computing only the new queries; reads compact rows."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._rows: list[SequenceRows] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """``forward_batch`` is already the physical view; its row slots are read once for all layers."""
        kv_lens = forward_batch.seq_lens_cpu.tolist()
        extend = forward_batch.forward_mode.is_extend(include_draft_extend_v2=True)
        num_queries = forward_batch.extend_seq_lens_cpu if extend else [1] * len(kv_lens)
        self._rows = batch_rows(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.tolist(), kv_lens, num_queries
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        output = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        paged_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            output.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self._rows,
            layer.scaling,
        )
        return output

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        rows = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        # Not self.forward_extend: on the instance that may watch the queries of prompts.
        return SdpaBackend.forward_extend(self, rows, k, v, layer, forward_batch, save_kv_cache)


def replace_torch_native(model_runner: ModelRunner) -> None:
    """Put our CPU attention in the place of torch_native; other backends stay."""
    replaced = model_runner.attn_backend
    if type(replaced) is TorchNativeAttnBackend:
        backend = model_runner.attn_backend = SdpaBackend(model_runner)
        backend.prefill_attention_backend_str = replaced.prefill_attention_backend_str
        backend.decode_attention_backend_str = replaced.decode_attention_backend_str


def _replace_only(result: object, model_runner: ModelRunner, *args: object, **kwargs: object) -> None:
    """AFTER ``ModelRunner.init_attention_backends`` of a server without kv policy."""
    replace_torch_native(model_runner)


def install_on_stock(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(TARGET, _replace_only, hook_type.AFTER)
