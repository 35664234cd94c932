"""The radix-cache backend ``evicpress``: built by SGLang's own registry once pools and model are there."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_evicpress import spawn
from sglang_evicpress.introspect.keyed_hash import key_of
from sglang_evicpress.patches.cache.radix_cache import EvicPressCache
from sglang_evicpress.patches.hook_check import check_applied
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.model_identity import ModelIdentity, adapter_digest, agreed
from sglang_evicpress.patches.unsupported import BACKEND_NAME, check_layers, check_model
from sglang_evicpress.tiers.entry.identity import KEY_BYTES
from sglang_evicpress.tiers.ssd.store import StoreError

logger = logging.getLogger(__name__)


def attention_scale(model: torch.nn.Module) -> float | None:
    """The factor its attention puts on q.k, None when no layer tells."""
    return next((float(layer.scaling) for layer in model.modules() if isinstance(layer, RadixAttention)), None)


def build(context: Any) -> EvicPressCache:
    """Factory for ``create_tree_cache``. Refuses to start on half-applied hooks or a model it cannot serve."""
    check_applied(HookRegistry)
    params = context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    try:
        check_model(context.model_config, pool, context.is_hybrid_swa, context.is_hybrid_ssm)
        check_layers(context.tp_worker.model_runner.model)
        config = config_of(context.server_args)  # its file may have changed since the main process read it
    except ValueError as error:  # RefusedErrors are
        raise spawn.refusal(str(error)) from None
    group = context.tp_group.cpu_group if context.tp_size > 1 else None
    scale = attention_scale(context.tp_worker.model_runner.model)
    compressor = Compressor(pool, params.page_size, config.sinks, window=config.window, scale=scale, group=group)
    runner = context.tp_worker.model_runner
    model = ModelIdentity(runner, context.model_config, pool, params.page_size, context.tp_size, group)
    try:
        identity = model.of_model() if config.has_tiers else bytes(KEY_BYTES)
        cache = EvicPressCache(params, config, compressor, identity, agreed(secrets.token_bytes(16), group))
    except (StoreError, RuntimeError, ValueError) as error:
        raise spawn.refusal(str(error)) from error
    if admin_key := context.server_args.admin_api_key:
        cache.inspector.rekey(key_of(admin_key))  # before the first question
    model.is_released = lambda: cache.are_weights_released
    cache.identify, cache.name_profiles, cache.forget_weights = model.of_model, model.of_profiles, model.forget_weights
    manager = getattr(runner, "lora_manager", None)  # only there with --enable-lora
    if manager is not None:
        cache.adapters.attach(lambda lora_id: adapter_digest(manager, lora_id), lambda: manager.loras)
    cache.vocab_size = context.model_config.vocab_size
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
