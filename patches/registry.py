"""The radix-cache backend ``evicpress``: built by SGLang's own registry once pools and model are there."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_evicpress.patches.compression import Compressor
from sglang_evicpress.patches.install import check_applied
from sglang_evicpress.patches.model_identity import agreed, model_identity, profile_identity
from sglang_evicpress.patches.radix_cache import EvicPressCache
from sglang_evicpress.patches.refusals import BACKEND_NAME, check_layers, check_model
from sglang_evicpress.patches.server_args import config_of
from sglang_evicpress.tiers.identity import KEY_BYTES
from sglang_evicpress.tiers.ssd import StoreError

logger = logging.getLogger(__name__)


def attention_scale(model: torch.nn.Module) -> float | None:
    """The factor its attention puts on q.k, None when no layer tells."""
    return next((float(layer.scaling) for layer in model.modules() if isinstance(layer, RadixAttention)), None)


def build(context: Any) -> EvicPressCache:
    """Factory for ``create_tree_cache``. Refuses to start on half-applied hooks or a model it cannot serve."""
    check_applied(HookRegistry)
    params = context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    check_model(context.model_config, pool, context.is_hybrid_swa, context.is_hybrid_ssm)
    check_layers(context.tp_worker.model_runner.model)
    config = config_of(context.server_args)
    group = context.tp_group.cpu_group if context.tp_size > 1 else None
    scale = attention_scale(context.tp_worker.model_runner.model)
    compressor = Compressor(pool, params.page_size, config.sinks, window=config.window, scale=scale, group=group)
    runner = context.tp_worker.model_runner

    def identify() -> bytes:
        return model_identity(
            runner.model, context.model_config, pool, params.page_size, runner.tp_rank, context.tp_size
        )

    def name_profiles(tokenizer: Any) -> bytes:
        return profile_identity(runner.model, context.model_config, pool, tokenizer, group)

    try:
        identity = identify() if config.has_tiers else bytes(KEY_BYTES)
        cache = EvicPressCache(params, config, compressor, identity, agreed(secrets.token_bytes(16), group))
    except (StoreError, RuntimeError, ValueError) as error:
        raise SystemExit(f"evicpress: {error}") from error
    cache.identify = identify
    cache.name_profiles = name_profiles
    logger.info(
        "evicpress: policy %s, alpha %g, forms %s, page size %d",
        config.policy,
        config.alpha,
        ",".join(map(str, config.forms)),
        params.page_size,
    )
    return cache


def install() -> None:
    if get_radix_cache_factory(BACKEND_NAME) is None:
        register_radix_cache_backend(BACKEND_NAME, build)
