"""Attention over compact rows: backends see a view of the batch whose KV lengths are physical; their kernels stay as
they are.

Touches ``ModelRunner.init_attention_backends``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.patches.attention import req_to_token
from sglang_evicpress.patches.attention.cpu_backend import TARGET, replace_torch_native
from sglang_evicpress.patches.attention.layer_groups import LayerGroupBackends
from sglang_evicpress.patches.attention.physical_view import physical_view
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.attention.query_ring import QueryRing
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.attention.types import AttentionBackend, ForwardBatch, ModelRunner

logger = logging.getLogger(__name__)


def _show_views(backend: AttentionBackend, table: RequestHoles, groups: LayerGroupBackends | None = None) -> None:
    """Give a backend instance the physical view wherever SGLang plans a forward pass (eager, capture, replay), and plan
    it for the other ``groups`` of layers."""

    def wrap(plan: Callable[..., None]) -> Callable[..., None]:
        def planned(forward_batch: ForwardBatch, *args: object, **kwargs: object) -> None:
            is_capture = bool(args and args[0]) or kwargs.get("in_capture", False)  # a made-up batch: no row, no holes
            if groups is not None and not getattr(forward_batch, "is_physical_view", False):
                groups.plan(None if is_capture else forward_batch, table)
            plan(forward_batch if is_capture else physical_view(forward_batch, table), *args, **kwargs)

        return planned

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(backend, name, wrap(getattr(backend, name)))


def _after_init_attention_backends(result: object, model_runner: ModelRunner, *args: object, **kwargs: object) -> None:
    """AFTER ``ModelRunner.init_attention_backends``: before CUDA graphs are captured, so that they see the table."""
    if model_runner.is_draft_worker:
        return
    pool = model_runner.req_to_token_pool
    table = RequestHoles(pool.req_to_token.shape[0], pool.req_to_token.device)
    req_to_token.attach(table)
    replace_torch_native(model_runner)
    groups = LayerGroupBackends.install_on(model_runner)  # beneath those that watch the queries of all layers
    PromptQueries.install_on(model_runner)
    QueryRing.install_on(model_runner)
    _show_views(model_runner.attn_backend, table, groups)
    logger.info("evicpress: attention over compact rows on %s", type(model_runner.attn_backend).__name__)


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(TARGET, _after_init_attention_backends, hook_type.AFTER)
