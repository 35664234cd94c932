"""The radix-cache backend ``evicpress``: built by SGLang's own registry once pools and model are there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_evicpress import spawn
from sglang_evicpress.config import AUTO, GB, EvicPressConfig
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.introspect.keyed_hash import key_of
from sglang_evicpress.patches.cache.lifecycles import cache_class
from sglang_evicpress.patches.cache.radix_cache import EvicPressCache
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.hook_check import check_applied
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.model_geometry import ServedModel, geometry_of
from sglang_evicpress.patches.tree.model_identity import ModelIdentity, adapter_digest, agreed
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.patches.unsupported import (
    BACKEND_NAME,
    attention_layers,
    check_every_layer,
    check_layers,
    check_model,
)
from sglang_evicpress.search.menu_budgets import layer_groups
from sglang_evicpress.tiers.entry.identity import KEY_BYTES
from sglang_evicpress.tiers.host.memory import auto_bytes, read_memory
from sglang_evicpress.tiers.ssd.folder import StoreError

logger = logging.getLogger(__name__)


def attention_scale(model: torch.nn.Module) -> Callable[[], float] | None:
    """Reads the factor that its attention puts on q.k, which SGLang's fallback to transformers only learns in the first
    pass; None when no layer tells."""
    layer = next(attention_layers(model), None)
    return None if layer is None else lambda: float(layer.scaling)


def are_weights_released(scheduler: Any) -> bool:
    """True if SGLang has given the memory of the weights back for now: it must not be read."""
    return scheduler is not None and GPU_MEMORY_TYPE_WEIGHTS in scheduler.weight_updater.offload_tags


def with_host_size(
    config: EvicPressConfig, pool_bytes: int, ranks: Ranks | None = None, num_sharing: int = 1
) -> EvicPressConfig:
    """The settings with a host tier's size in place of auto, the least of what ``ranks`` find, of which ``num_sharing``
    share this machine's memory. Raises ValueError, one sentence, where an SSD or an external store needs it."""
    if config.host_gb != AUTO:
        return config
    memory = read_memory()
    num_bytes = auto_bytes(memory, pool_bytes, num_sharing)
    if ranks is not None:
        (num_bytes,) = ranks.lowest(torch.tensor([num_bytes])).tolist()
    if not num_bytes and (config.ssd_dir is not None or config.stores.backend is not None):
        has = f"ssd_dir {config.ssd_dir!r}" if config.ssd_dir else f"external_backend {config.stores.backend!r}"
        raise ValueError(
            f"host_gb is auto with {has}, and only {memory.free / GB:.1f} GB are free, of which "
            f"{memory.reserve / GB:.1f} GB stay so: expected memory, or the GB that KV may go through on its way"
        )
    logger.info(
        "evicpress: --kv-host-gb auto is %.3f: %.3f GB free, of which %.3f GB stay so, and a KV pool of %.3f GB%s",
        *(size / GB for size in (num_bytes, memory.free, memory.reserve, pool_bytes)),
        f", for each of {num_sharing} ranks" if num_sharing > 1 else "",
    )
    return replace(config, host_gb=num_bytes / GB)


def _geometry(
    path: str | None, model: torch.nn.Module, model_config: Any, pool: Any, ranks: tuple[int, int]
) -> QueryGeometry | None:
    """That of the file ``path``. A file of another model ends the start."""
    if path is None:
        return None
    served = ServedModel(
        module=model,
        path=model_config.model_path,
        revision=model_config.revision,
        num_layers=pool.layer_num,
        num_heads=model_config.num_attention_heads,
        num_kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=pool.head_dim,
        rank=ranks,
    )
    try:
        return geometry_of(path, served)
    except ValueError as error:
        raise spawn.refusal(str(error)) from None


def selection(config: EvicPressConfig, page_size: int) -> dict[str, int]:
    """Settings by which a form of a node keeps other tokens than usual: whole pages, other sinks, another window of
    queries, and budgets rounded to another number of counts."""
    usual = EvicPressConfig(config.policy)
    chosen = {
        "page_size": (page_size, 1),
        "sinks": (config.sinks, usual.sinks),
        "window": (config.window, usual.window),
        "layer_counts": (config.layers.max_counts, usual.layers.max_counts),
    }
    if not any(form.is_uneven for form in config.menu_forms):
        del chosen["layer_counts"]
    return {name: value for name, (value, default) in chosen.items() if value != default}


def build(context: Any) -> EvicPressCache:
    """Factory for ``create_tree_cache``. Refuses to start on half-applied hooks or a model it cannot serve."""
    check_applied(HookRegistry)
    params = context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    try:
        check_model(context.model_config, pool, context.is_hybrid_swa, context.is_hybrid_ssm)
        check_layers(context.tp_worker.model_runner.model)
        config = config_of(context.server_args)  # its file may have changed since the main process read it
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        check_every_layer(context.tp_worker.model_runner.model, layers, config)
    except ValueError as error:  # RefusedErrors are
        raise spawn.refusal(str(error)) from None
    group = context.tp_group.cpu_group if context.tp_size > 1 else None
    scale = attention_scale(context.tp_worker.model_runner.model)
    groups = layer_groups(config.menu_forms, config.layers.shares, pool.layer_num, config.layers.max_counts)
    runner = context.tp_worker.model_runner
    ranks = RELEASE.ranks_of(runner)
    geometry = _geometry(config.geometry, runner.model, context.model_config, pool, ranks)
    compressor = Compressor(
        pool,
        params.page_size,
        config.sinks,
        window=config.window,
        scale=scale,
        group=group,
        groups=groups,
        geometry=geometry,
    )
    calibrated = "" if geometry is None else geometry.digest
    chosen = selection(config, params.page_size)
    model = ModelIdentity(runner, context.model_config, pool, params.page_size, ranks, group, calibrated, chosen)
    admin_key = context.server_args.admin_api_key
    hash_key = key_of(admin_key) if admin_key else b""
    try:
        num_here = max(1, context.tp_size // context.server_args.nnodes)
        config = with_host_size(config, pool.size * compressor.slot_bytes, compressor.ranks, num_here)
        identity = model.of_model() if config.has_tiers else bytes(KEY_BYTES)
        cache = cache_class()(params, config, compressor, identity, agreed(secrets.token_bytes(16), group), hash_key)
    except (StoreError, RuntimeError, ValueError) as error:
        raise spawn.refusal(str(error)) from error
    model.is_released = lambda: are_weights_released(cache.scheduler)
    cache.know_model(model)
    manager = getattr(runner, "lora_manager", None)  # only there with --enable-lora
    if manager is not None:
        cache.parts.tree.adapters.attach(lambda lora_id: adapter_digest(manager, lora_id), lambda: manager.loras)
    cache.vocab_size = context.model_config.vocab_size
    logger.info(
        "evicpress: policy %s, %s, forms %s, page size %d",
        config.policy,
        f"alpha {config.start_alpha:g}" if config.target_quality is None else f"quality {config.target_quality:g}",
        ",".join(map(str, config.forms)),
        params.page_size,
    )
    return cache


def install() -> None:
    if get_radix_cache_factory(BACKEND_NAME) is None:
        register_radix_cache_backend(BACKEND_NAME, build)
