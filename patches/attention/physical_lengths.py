"""Attention over compact rows: backends see a view of the batch whose KV lengths are physical; their kernels stay as
they are.

Touches ``ModelRunner.init_attention_backends``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.cpu_backend import TARGET, replace_torch_native
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.attention.query_ring import QueryRing
from sglang_evicpress.patches.attention.types import AttentionBackend, ForwardBatch, ModelRunner

logger = logging.getLogger(__name__)


def physical_view(forward_batch: ForwardBatch, table: req_to_token.RequestHoles) -> ForwardBatch:
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


def _show_views(backend: AttentionBackend, table: req_to_token.RequestHoles) -> None:
    """Give a backend instance the physical view wherever SGLang plans a forward pass (eager, capture, replay)."""

    def wrap(plan: Callable[..., None]) -> Callable[..., None]:
        def planned(forward_batch: ForwardBatch, *args: object, **kwargs: object) -> None:
            is_capture = bool(args and args[0]) or kwargs.get("in_capture", False)  # a made-up batch: no row, no holes
            plan(forward_batch if is_capture else physical_view(forward_batch, table), *args, **kwargs)

        return planned

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(backend, name, wrap(getattr(backend, name)))


def _after_init_attention_backends(result: object, model_runner: ModelRunner, *args: object, **kwargs: object) -> None:
    """AFTER ``ModelRunner.init_attention_backends``: before CUDA graphs are captured, so that they see the table."""
    if model_runner.is_draft_worker:
        return
    pool = model_runner.req_to_token_pool
    table = req_to_token.RequestHoles(pool.req_to_token.shape[0], pool.req_to_token.device)
    req_to_token.attach(table)
    replace_torch_native(model_runner)
    PromptQueries.install_on(model_runner)
    QueryRing.install_on(model_runner)
    _show_views(model_runner.attn_backend, table)
    logger.info("evicpress: attention over compact rows on %s", type(model_runner.attn_backend).__name__)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(TARGET, _after_init_attention_backends, hook_type.AFTER)
