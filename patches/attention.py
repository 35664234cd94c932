"""Attention over compact rows: backends see a view of the batch whose KV lengths are physical; their kernels stay as
they are.

Touches ``ModelRunner.init_attention_backend``. On the CPU, torch_native is replaced by ``SdpaBackend``, which computes
only the new queries of a sequence.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_evicpress.cpu_attention import SequenceRows, batch_rows, paged_attention
from sglang_evicpress.patches import rows
from sglang_evicpress.patches.capture import QueryCapture
from sglang_evicpress.patches.decode_queries import QueryRing

logger = logging.getLogger(__name__)


def physical_view(forward_batch: Any, table: rows.HoleTable) -> Any:
    """The batch as attention must see it: every KV length less the holes of its row; the batch itself when there are
    none.

    Positions stay logical. A finished request can still be in the batch in flight, hence the clamps: KV length >= 1,
    prefix >= 0. Nothing here waits for the device: host lengths come from the host mirror of the table.
    """
    if getattr(forward_batch, "is_physical_view", False):  # SGLang's eager planning calls the one for graphs
        return forward_batch
    batch_size = forward_batch.batch_size
    holes = (table.batch + [0] * batch_size)[:batch_size]
    if not any(holes):
        return forward_batch
    view = copy.copy(forward_batch)
    view.is_physical_view = True
    on_device = table.device[forward_batch.req_pool_indices]
    on_host = torch.tensor(holes, dtype=torch.int64)
    extend = forward_batch.forward_mode.is_extend()
    view.seq_lens = _less(forward_batch.seq_lens, on_device, extend)
    if forward_batch.seq_lens_cpu is not None:
        lens = forward_batch.seq_lens_cpu
        view.seq_lens_cpu = _less(lens, on_host[: len(lens)], extend)
        view.seq_lens_sum = int(view.seq_lens_cpu.sum())
    prefix_lens = getattr(forward_batch, "extend_prefix_lens", None)
    if prefix_lens is not None:
        view.extend_prefix_lens = (prefix_lens - on_device.to(prefix_lens.dtype)).clamp_(min=0)
    prefix_lens_cpu = getattr(forward_batch, "extend_prefix_lens_cpu", None)
    if prefix_lens_cpu is not None:
        view.extend_prefix_lens_cpu = [
            max(0, length - gap) for length, gap in zip(prefix_lens_cpu, holes, strict=False)
        ]
    return view


def _less(lens: torch.Tensor, holes: torch.Tensor, extend: bool) -> torch.Tensor:
    """Physical KV lengths. Full prefill graphs pad with sequences of no length, which keep it."""
    return (lens - holes.to(lens.dtype)).clamp_(min=lens.clamp(max=1) if extend else 1)


class SdpaBackend(TorchNativeAttnBackend):
    """torch_native for the CPU, computing only the new queries; reads compact rows."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._rows: list[SequenceRows] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """``forward_batch`` is already the physical view; its row slots are read once for all layers."""
        kv_lens = forward_batch.seq_lens_cpu.tolist()
        extend = forward_batch.forward_mode.is_extend(include_draft_extend_v2=True)
        num_queries = forward_batch.extend_seq_lens_cpu if extend else [1] * len(kv_lens)
        self._rows = batch_rows(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.tolist(), kv_lens, num_queries
        )

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        return self._attend(
            q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim), k, v, layer, forward_batch, save_kv_cache
        )

    def _attend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
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


def _show_views(backend: Any, table: rows.HoleTable) -> None:
    """Give a backend instance the physical view wherever SGLang plans a forward pass (eager, capture, replay)."""

    def wrap(plan: Callable[..., None]) -> Callable[..., None]:
        def planned(forward_batch: Any, *args: Any, **kwargs: Any) -> None:
            is_capture = bool(args and args[0]) or kwargs.get("in_capture", False)  # a made-up batch: no row, no holes
            plan(forward_batch if is_capture else physical_view(forward_batch, table), *args, **kwargs)

        return planned

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(backend, name, wrap(getattr(backend, name)))


def replace_torch_native(model_runner: Any) -> None:
    """Put our CPU attention in the place of torch_native; other backends stay."""
    replaced = model_runner.attn_backend
    if type(replaced) is TorchNativeAttnBackend:
        backend = model_runner.attn_backend = SdpaBackend(model_runner)
        backend.prefill_attention_backend_str = replaced.prefill_attention_backend_str
        backend.decode_attention_backend_str = replaced.decode_attention_backend_str


def _after_init_attention_backend(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``ModelRunner.init_attention_backend``: before CUDA graphs are captured, so that they see the table."""
    if model_runner.is_draft_worker:
        return
    pool = model_runner.req_to_token_pool
    table = rows.HoleTable(pool.req_to_token.shape[0], pool.req_to_token.device)
    rows.attach(table)
    replace_torch_native(model_runner)
    QueryCapture.install_on(model_runner)
    QueryRing.install_on(model_runner)
    _show_views(model_runner.attn_backend, table)
    logger.info("evicpress: attention over compact rows on %s", type(model_runner.attn_backend).__name__)


TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backend"


def install(registry: Any, hook_type: Any) -> None:
    registry.register(TARGET, _after_init_attention_backend, hook_type.AFTER)


def _replace_only(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``ModelRunner.init_attention_backend`` of a server without kv policy."""
    replace_torch_native(model_runner)


def install_on_stock(registry: Any, hook_type: Any) -> None:
    registry.register(TARGET, _replace_only, hook_type.AFTER)
