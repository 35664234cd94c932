"""Combinations that a kv policy refuses: a table of server arguments, and checks of the model and pool.

Each refusal is one sentence that names what was asked for, says why it cannot work and gives the way out.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_evicpress.config import AUTO, GB, EvicPressConfig, memory_bytes
from sglang_evicpress.core import PRESSES
from sglang_evicpress.decode_budget import schedule
from sglang_evicpress.decode_budget.scores import SCORES
from sglang_evicpress.decode_budget.settings import CLIENT_BUDGETS, DecodeSettings, parse_protected_pages
from sglang_evicpress.patches.hook_points import is_within

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")
BACKEND_NAME = "evicpress"


class UnsupportedError(ValueError):
    """The server cannot be started as asked. The command line prints the sentence and exits with status 2."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One row: the ``attribute`` of ServerArgs (or of SGLang's ``envs``) whose value ``conflicts``, and the ``reason``
    with the way out. The row is of releases from ``since`` on and before ``until``; "" sets no limit."""

    attribute: str
    conflicts: Callable[[Any], bool]
    reason: str
    since: str = ""
    until: str = ""

    @property
    def flag(self) -> str:
        """As the user types it."""
        return self.attribute if self.attribute.isupper() else "--" + self.attribute.replace("_", "-")


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


def _more_than_one(value: int) -> bool:
    return value > 1


def _given(value: object) -> bool:
    return value is not None


_ONE_SERVER_EACH = "start one server per replica, for example behind sglang-router"
_NO_MESSAGES = f"the data-parallel controller does not pass on our messages, so {_ONE_SERVER_EACH}"
_BACKENDS = f"only {', '.join(ATTENTION_BACKENDS)} are known to read compact rows, so choose one of them"
_SPLITS_WORK = "it splits work over workers that do not see the compact rows, so leave it out"
_READS_ROWS = "it reads KV slots by token position, which a compressed prefix does not keep, so leave it out"
_OTHER_POLICY = "the kv policy decides what is evicted, so leave it out"
_OTHER_CACHE = "it brings its own prefix cache, so leave out one of the two"
_OTHER_SERVER = "a compressed prefix cannot be sent to another server, so serve prefill and decode together"
_HTTP_ONLY = "the /evicpress routes are HTTP only, so serve over HTTP"
_OTHER_KERNELS = "its kernels are not known to read compact rows, so leave it out"
_LAYOUT = "only plain [slot, head, dim] pools can be compressed, so leave it out"

UNSUPPORTED = (
    Unsupported("disable_radix_cache", bool, "a kv policy needs prefixes, so leave it out"),
    Unsupported("radix_cache_backend", _other_than(None, BACKEND_NAME), _OTHER_CACHE),
    Unsupported("radix_eviction_policy", _other_than("lru"), _OTHER_POLICY),
    Unsupported("radix_eviction_policy_config", _given, _OTHER_POLICY, since="0.5.22"),
    Unsupported("enable_hierarchical_cache", bool, _OTHER_CACHE),
    Unsupported("enable_lmcache", bool, _OTHER_CACHE),
    Unsupported("enable_flexkv", bool, _OTHER_CACHE, since="0.5.22"),
    Unsupported("enable_unified_cache_external_linker", bool, _OTHER_CACHE, since="0.5.22"),
    Unsupported("hicache_host_memory_mode", _other_than("cache"), _OTHER_CACHE, since="0.5.22"),
    Unsupported("enable_streaming_session", bool, _READS_ROWS),
    Unsupported("enable_session_radix_cache", bool, _READS_ROWS),
    Unsupported("strip_thinking_cache", bool, _READS_ROWS),
    Unsupported("enable_return_routed_experts", bool, _READS_ROWS),
    Unsupported("enable_return_indexer_topk", bool, _READS_ROWS),
    Unsupported("kv_canary", _other_than("none"), _READS_ROWS),
    Unsupported("speculative_algorithm", bool, _READS_ROWS),
    Unsupported("decoupled_spec_role", _other_than("null"), _READS_ROWS),
    Unsupported("dllm_algorithm", bool, _READS_ROWS),
    Unsupported("enable_hisparse", bool, _READS_ROWS),
    Unsupported("enable_mis", bool, _READS_ROWS),
    Unsupported("disaggregation_mode", _other_than("null"), _OTHER_SERVER),
    Unsupported("disaggregation_decode_retraction_backup", _other_than(None, "none"), _OTHER_SERVER, since="0.5.22"),
    Unsupported("enable_pd_role_switch", bool, _OTHER_SERVER, since="0.5.22"),
    Unsupported("encoder_only", bool, "an encoder keeps no KV cache, so leave out --kv-policy"),
    Unsupported("pp_size", _more_than_one, "pipeline stages do not agree on slots yet, so use --tp-size instead"),
    Unsupported("dp_size", _more_than_one, _NO_MESSAGES),
    Unsupported("attn_dp_size", _more_than_one, _NO_MESSAGES, since="0.5.22"),
    Unsupported("attn_cp_size", _more_than_one, _SPLITS_WORK),
    Unsupported("dcp_size", _more_than_one, _SPLITS_WORK),
    Unsupported("enable_prefill_cp", bool, _SPLITS_WORK),
    Unsupported("enable_kv_cache_sharding", bool, _SPLITS_WORK, since="0.5.22"),
    Unsupported("enable_two_batch_overlap", bool, _SPLITS_WORK),
    Unsupported("enable_pdmux", bool, _SPLITS_WORK),
    Unsupported(
        "tokenizer_worker_num",
        _more_than_one,
        f"its workers load no plugins and would lack the /evicpress routes, so use 1 or {_ONE_SERVER_EACH}",
    ),
    Unsupported("grpc_mode", bool, _HTTP_ONLY),
    Unsupported("smg_grpc_mode", bool, _HTTP_ONLY, since="0.5.22"),
    Unsupported("grpc_port", _given, _HTTP_ONLY, since="0.5.22"),
    Unsupported("use_ray", bool, "Ray workers load no plugins, so leave it out"),
    Unsupported("enable_unified_memory", bool, _LAYOUT),
    Unsupported("enable_page_major_kv_layout", bool, _LAYOUT),
    Unsupported("prefill_only_disable_kv_cache", bool, _LAYOUT),
    Unsupported(
        "kv_cache_dtype",
        lambda value: str(value).startswith(("fp4", "fp8", "mxfp8", "nvfp4")),
        "quantised KV cannot be scored and moved by slot yet, so use auto or bf16",
    ),
    Unsupported(
        "device",
        lambda value: value is not None and value.split(":")[0] not in ("cpu", "cuda"),
        "only cpu and cuda are served, so use one of them",
    ),
    Unsupported("enable_nvidia_megakernel", bool, _OTHER_KERNELS, since="0.5.22"),
    Unsupported("enable_amd_monokernel", bool, _OTHER_KERNELS, since="0.5.22"),
    Unsupported("attention_backend", _other_than(None, *ATTENTION_BACKENDS), _BACKENDS),
    Unsupported("prefill_attention_backend", _other_than(None, *ATTENTION_BACKENDS), _BACKENDS),
    Unsupported("decode_attention_backend", _other_than(None, *ATTENTION_BACKENDS), _BACKENDS),
)

UNSUPPORTED_ENVIRONMENT = (
    Unsupported("SGLANG_USE_HND_KVCACHE", bool, _LAYOUT),
    Unsupported("SGLANG_AITER_KV_CACHE_LAYOUT", _other_than("nhd"), _LAYOUT),
    Unsupported("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", bool, _OTHER_CACHE, until="0.5.18"),
    Unsupported("SGLANG_ENABLE_UNIFIED_RADIX_TREE", bool, _OTHER_CACHE, until="0.5.18"),
    # it replays how a decode step was planned, with or without holes, for batches that have others
    Unsupported("SGLANG_ENABLE_METADATA_GLUE_GRAPH", bool, _READS_ROWS, since="0.5.22"),
    Unsupported(
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        bool,
        "what is kept of queries is bounded by the size of the pool, which it makes known too late, so leave it out",
        since="0.5.22",
    ),
    Unsupported(
        "SGLANG_RUST_SERVER",
        bool,
        "it has no place for the /evicpress routes, so leave it out and serve with Python's HTTP server",
        since="0.5.22",
    ),
)


def rows(table: Iterable[Unsupported]) -> list[Unsupported]:
    """Those of the installed release."""
    version = importlib.metadata.version("sglang")
    return [row for row in table if is_within(version, row.since, row.until)]


def check(server_args: Any, config: EvicPressConfig) -> None:
    """Refuse what the arguments, or the environment, already show cannot work.

    Called before SGLang resolves its defaults, for what the user gave, and again after, for what it chose.
    Raises UnsupportedError.
    """
    from sglang.srt.environ import envs

    prefill = server_args.prefill_attention_backend or server_args.attention_backend
    decode = server_args.decode_attention_backend or server_args.attention_backend
    if "flashinfer" in (prefill, decode) and is_deterministic(server_args):
        raise UnsupportedError(
            f"--kv-policy {config.policy} cannot be combined with --enable-deterministic-inference on flashinfer: "
            "SGLang keeps no prefixes then, so give --attention-backend triton or fa3"
        )
    for row in rows(UNSUPPORTED):
        _raise_unsupported(config, row, getattr(server_args, row.attribute))
    for row in rows(UNSUPPORTED_ENVIRONMENT):
        _raise_unsupported(config, row, getattr(envs, row.attribute).get())
    if prefill and decode and prefill != decode:
        raise UnsupportedError(
            f"--kv-policy {config.policy} cannot be combined with {prefill} for prefill and {decode} for decode: "
            "compact rows need one backend for both, so give --attention-backend alone"
        )
    if server_args.enable_torch_compile and server_args.device == "cpu":
        raise UnsupportedError(
            f"--kv-policy {config.policy} cannot be combined with --enable-torch-compile on a CPU: the attention that "
            "reads compact rows there has no graphs, so leave it out"
        )
    if "torch_native" in (prefill, decode) and (server_args.device or "cpu").startswith("cuda"):
        raise UnsupportedError(
            f"--kv-policy {config.policy} cannot be combined with --attention-backend torch_native on cuda: it would "
            "wait for the device in every step, so choose flashinfer, triton or fa3"
        )
    reason = no_tiers_reason(server_args, config)
    if reason is not None and config.host_gb not in (AUTO, 0):
        raise UnsupportedError(f"--kv-host-gb {config.host_gb:g} {reason}")
    if reason is not None and config.ssd_dir is not None:
        raise UnsupportedError(f"--kv-ssd-dir {config.ssd_dir} {reason}")
    if config.stores.backend is not None:
        backend = f"--kv-external-backend {config.stores.backend}"
        if reason is not None:
            raise UnsupportedError(f"{backend} {reason}")
        if server_args.tp_size > 1:
            raise UnsupportedError(
                f"{backend} cannot be combined with --tp-size {server_args.tp_size}: that ranks find the same there "
                "has not been shown yet, so leave out one of the two"
            )
    _check_shared_tiers(server_args, config)
    _check_slot_checks(server_args, config)
    _check_uneven(server_args, config)
    _check_decode(config, server_args.page_size)
    if SCORES[config.decode.score].needs_queries and server_args.tp_size > 1:
        raise UnsupportedError(
            f"--kv-decode-score {config.decode.score} cannot be combined with --tp-size {server_args.tp_size}: that "
            "ranks agree on what goes by queries of decode steps has not been shown yet, so choose another score, "
            "or use --tp-size 1"
        )
    if _has_full_prefill_graph(server_args):
        for form in config.menu_forms:
            if form.press is not None and PRESSES[form.press].needs_queries:
                raise UnsupportedError(
                    f"--kv-forms {form} cannot be combined with --cuda-graph-backend-prefill full: a full "
                    f"graph hides the queries that {form.press} looks at, so choose another press or graph backend"
                )
        if SCORES[config.decode.score].needs_queries:
            raise UnsupportedError(
                f"--kv-decode-score {config.decode.score} cannot be combined with --cuda-graph-backend-prefill full: a "
                "full graph hides the queries that it goes by, so choose another score or graph backend"
            )


def _check_shared_tiers(server_args: Any, config: EvicPressConfig) -> None:
    """Refuse what tiers of several ranks cannot be combined with."""
    if server_args.tp_size == 1 or not config.has_tiers:
        return
    num_here = max(1, server_args.tp_size // server_args.nnodes)
    total_gb, memory_gb = 0.0 if config.host_gb == AUTO else config.host_gb * num_here, memory_bytes() / GB
    if total_gb > memory_gb:
        raise UnsupportedError(
            f"--kv-host-gb {config.host_gb:g} with --tp-size {server_args.tp_size} is {total_gb:g} GB in all, and this "
            f"machine has {memory_gb:.1f} GB of memory: expected less"
        )
    if config.ssd_dir is not None and (server_args.enable_lora or server_args.lora_paths):
        raise UnsupportedError(
            f"--kv-ssd-dir {config.ssd_dir} with --tp-size {server_args.tp_size} cannot be combined with LoRA: ranks "
            "hold other parts of an adapter and would not agree on its name, so leave out one of the two"
        )


def _check_slot_checks(server_args: Any, config: EvicPressConfig) -> None:
    """Refuse what each rank would find by itself, of its own heads."""
    if config.slot_checks and server_args.tp_size > 1:
        raise UnsupportedError(
            f"--kv-slot-checks {config.slot_checks:g} cannot be combined with --tp-size {server_args.tp_size}: what "
            "one rank finds changed would be a miss there alone, so leave out one of the two"
        )


def _check_uneven(server_args: Any, config: EvicPressConfig) -> None:
    """Refuse what forms whose layers keep different numbers of tokens cannot be combined with."""
    form = next((form for form in config.menu_forms if form.is_uneven), None)
    if form is None:
        return
    uneven = f"--kv-forms {form}, by which layers keep different numbers of tokens, cannot be combined with"
    if server_args.tp_size > 1:
        raise UnsupportedError(
            f"{uneven} --tp-size {server_args.tp_size}: that ranks place these alike has not been shown yet, so leave "
            "out the layer budget, or use --tp-size 1"
        )
    if config.decode.budget > 0:
        raise UnsupportedError(
            f"{uneven} --kv-decode-budget {config.decode.budget}: running requests drop the same slots in all layers, "
            "so leave out one of the two"
        )


def no_tiers_reason(server_args: Any, config: EvicPressConfig) -> str | None:
    """Whatever keeps KV on the GPU alone, with the way out, as it goes on behind the flag that asked for a tier; None
    where there may be tiers. Before SGLang has resolved its defaults, by what the user gave."""
    if _has_full_prefill_graph(server_args):
        return (
            "cannot be combined with --cuda-graph-backend-prefill full: a full graph does not wait for the layers that "
            "are loaded back, so choose another graph backend, or leave out --kv-host-gb and --kv-ssd-dir"
        )
    return None


def _has_full_prefill_graph(server_args: Any) -> bool:
    graphs = server_args.cuda_graph_config
    return "full" in (server_args.cuda_graph_backend_prefill, graphs and graphs.prefill.backend)


def is_deterministic(server_args: Any) -> bool:
    """True if SGLang is asked for the same answer whatever runs beside it; for flashinfer it then keeps no prefixes."""
    return bool(server_args.enable_deterministic_inference or server_args.rl_on_policy_target is not None)


def decode_settings(config: EvicPressConfig) -> DecodeSettings:
    """The budget of requests that ask for none themselves. Raises ValueError, one sentence."""
    if config.decode.client_budgets not in CLIENT_BUDGETS:
        raise ValueError(
            f"kv_decode_client_budgets is {config.decode.client_budgets!r}: expected {', '.join(CLIENT_BUDGETS)}"
        )
    return DecodeSettings(
        config.decode.budget,
        config.decode.method,
        config.decode.score,
        config.decode.interval,
        parse_protected_pages(config.decode.protected_pages),
    )


def check_decode(
    settings: DecodeSettings, page_size: int, sinks: int, *, keeps_queries: bool, has_geometry: bool
) -> None:
    """Raise ValueError, one sentence, for a budget that this server cannot keep."""
    _check_geometry(settings, has_geometry=has_geometry)
    if settings.reads_queries and not keeps_queries:
        raise ValueError(
            f"kv_decode_score {settings.score!r} goes by queries of decode steps, which this server does not keep: "
            f"start it with --kv-decode-score {settings.score}, or choose another"
        )
    schedule.check(settings, page_size, sinks)


def _check_geometry(settings: DecodeSettings, *, has_geometry: bool) -> None:
    if settings.needs_geometry and not has_geometry:
        raise ValueError(
            f"kv_decode_score {settings.score!r} goes by the geometry of queries, which this server was not given: "
            "start it with --kv-geometry FILE, which evicpress calibrate geometry makes, or choose another"
        )


def _check_decode(config: EvicPressConfig, page_size: int | None) -> None:
    try:
        settings, has_geometry = decode_settings(config), config.geometry is not None
        _check_geometry(settings, has_geometry=has_geometry)
        if settings.tokens > 0 and page_size is not None:  # else SGLang is yet to choose one: then it comes again
            check_decode(settings, page_size, config.sinks, keeps_queries=True, has_geometry=has_geometry)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None


def _raise_unsupported(config: EvicPressConfig, row: Unsupported, value: Any) -> None:
    if row.conflicts(value):
        asked = row.flag if value is True else f"{row.flag} {value}"
        raise UnsupportedError(f"--kv-policy {config.policy} cannot be combined with {asked}: {row.reason}")


_WAY_OUT = "start without --kv-policy, or serve a text model whose layers all use full causal attention"
_KNOWN_LAYERS = ("full_attention", "attention", "mlp", "moe")


def check_model_config(model_config: Any) -> None:
    """Refuse a model whose configuration shows KV that cannot be compressed per head. Raises UnsupportedError."""
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
    from sglang.srt.configs.model_config import AttentionArch

    text = model_config.hf_text_config
    architecture = model_config.hf_config.architectures[0]
    named = (getattr(text, name, None) or () for name in ("layer_types", "layers_block_type"))
    others = sorted({layer for layers in named for layer in layers} - set(_KNOWN_LAYERS))
    reasons = (
        (model_config.attention_arch == AttentionArch.MLA, "keeps one latent KV for all heads (MLA)"),
        (model_config.is_hybrid_swa, "has sliding-window layers"),
        (model_config.attention_chunk_size is not None, "has chunked local attention"),
        (getattr(model_config.hf_config, "dual_chunk_attention_config", None), "has dual-chunk attention"),
        (model_config.is_encoder_decoder, "is an encoder-decoder with cross attention"),
        (get_linear_attn_config(model_config.hf_config), "has linear-attention layers"),
        (getattr(text, "attn_temperature_len", 0) > 0, "scales attention by position"),
        (others, f"has {', '.join(others)} layers"),
        (
            model_config.is_multimodal or model_config.is_audio_model,
            "reads images, video or audio, which its tokens do not tell apart for good",
        ),
    )
    _refuse(f"{architecture} cannot be served with a kv policy, because it", reasons)


def _refuse(subject: str, reasons: Iterable[tuple[object, str]]) -> None:
    """By the first reason that is present."""
    for is_present, what in reasons:
        if is_present:
            raise UnsupportedError(f"{subject} {what}: {_WAY_OUT}")


def attention_layers(model: Any) -> Iterator[Any]:
    """The RadixAttention layers of a built model (torch module). SGLang's fallback to the code of transformers keeps
    them beside the modules."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            yield module
        yield from getattr(module, "attention_instances", {}).values()


def check_every_layer(model: Any, layers: range, config: EvicPressConfig) -> None:
    """Refuse forms whose press reads the prompt's queries for a built model of which some of ``layers`` have no
    attention: theirs never come. Raises UnsupportedError."""
    missing = sorted(set(layers) - {layer.layer_id for layer in attention_layers(model)})
    for form in config.menu_forms:
        if missing and form.press is not None and PRESSES[form.press].needs_queries:
            raise UnsupportedError(
                f"form {form} needs queries of every layer, and layer {missing[0]} of this model has no attention: "
                "leave the form out"
            )


def check_layers(model: Any) -> None:
    """Refuse a built model (torch module) whose attention needs token positions. Raises UnsupportedError."""
    from sglang.srt.layers.radix_attention import AttentionType

    for layer in attention_layers(model):
        reasons = (
            (layer.sliding_window_size > 0, "has a sliding window"),
            (layer.use_irope, "has chunked local attention"),
            (layer.is_cross_attention, "is cross attention"),
            (layer.attn_type != AttentionType.DECODER, f"is {layer.attn_type.value} attention"),
            (layer.xai_temperature_len > 0, "scales attention by position"),
        )
        name = type(model).__name__
        _refuse(f"{name} cannot be served with a kv policy, because attention layer {layer.layer_id}", reasons)


def check_model(model_config: Any, kv_pool: Any, is_hybrid_swa: bool, is_hybrid_ssm: bool) -> None:
    """Refuse a model or a KV pool that cannot be compressed, as the scheduler knows it. Raises UnsupportedError.

    ``kv_pool`` must be exactly MHATokenToKVPool, laid out [slot, head, dim]: subclasses pack or move bytes.
    """
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    check_model_config(model_config)
    architecture = model_config.hf_config.architectures[0]
    reasons = (is_hybrid_swa, "has sliding-window layers"), (is_hybrid_ssm, "has Mamba layers")
    _refuse(f"{architecture} cannot be served with a kv policy, because it", reasons)
    if type(kv_pool) is not MHATokenToKVPool or kv_pool.kv_cache_layout != "nhd":
        layout = getattr(kv_pool, "kv_cache_layout", "its own")
        raise UnsupportedError(
            f"the KV pool is a {type(kv_pool).__name__} with layout {layout}, and a kv policy needs a plain "
            "MHATokenToKVPool with layout nhd: leave out the flag that chose it, or start without --kv-policy"
        )
    if kv_pool.head_dim != kv_pool.v_head_dim or kv_pool.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"{architecture} keeps its KV as {kv_pool.dtype} with heads of {kv_pool.head_dim} and {kv_pool.v_head_dim},"
            " and a kv policy needs float16, bfloat16 or float32 and equal heads: give --kv-cache-dtype bf16, or start "
            "without --kv-policy"
        )
