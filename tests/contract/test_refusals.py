"""Each combination that cannot work is refused by name, with the way out; plain arguments pass."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Form
from sglang_evicpress.flag_groups import DecodeFlags
from sglang_evicpress.patches import unsupported
from sglang_evicpress.patches.unsupported import UnsupportedError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CONFIG = EvicPressConfig("evicpress")

CONFLICTS: dict[str, Any] = {
    "disable_radix_cache": True,
    "radix_cache_backend": "flexkv",
    "radix_eviction_policy": "lfu",
    "radix_eviction_policy_config": {"protected_threshold": 4},
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "enable_flexkv": True,
    "enable_unified_cache_external_linker": True,
    "hicache_host_memory_mode": "buffer_only",
    "enable_streaming_session": True,
    "enable_session_radix_cache": True,
    "strip_thinking_cache": True,
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": True,
    "kv_canary": "log",
    "speculative_algorithm": "EAGLE",
    "decoupled_spec_role": "drafter",
    "dllm_algorithm": "LowConfidence",
    "enable_hisparse": True,
    "enable_mis": True,
    "disaggregation_mode": "prefill",
    "disaggregation_decode_retraction_backup": "host_pool",
    "enable_pd_role_switch": True,
    "encoder_only": True,
    "pp_size": 2,
    "dp_size": 2,
    "attn_dp_size": 2,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "enable_prefill_cp": True,
    "enable_kv_cache_sharding": True,
    "enable_two_batch_overlap": True,
    "enable_pdmux": True,
    "tokenizer_worker_num": 2,
    "grpc_mode": True,
    "smg_grpc_mode": True,
    "grpc_port": 40000,
    "use_ray": True,
    "enable_unified_memory": True,
    "enable_page_major_kv_layout": True,
    "prefill_only_disable_kv_cache": True,
    "kv_cache_dtype": "fp8_e4m3",
    "device": "xpu",
    "enable_nvidia_megakernel": True,
    "enable_amd_monokernel": True,
    "attention_backend": "intel_amx",
    "prefill_attention_backend": "trtllm_mha",
    "decode_attention_backend": "flashmla",
}
ENVIRONMENT_CONFLICTS = {
    "SGLANG_USE_HND_KVCACHE": "1",
    "SGLANG_AITER_KV_CACHE_LAYOUT": "vectorized_5d",
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "1",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1",
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "1",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1",
    "SGLANG_RUST_SERVER": "1",
}


@pytest.fixture
def server_args() -> Any:
    """Arguments as the user gave them: for the placeholder model SGLang resolves nothing."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="dummy")


def _refuse(text: str, server_args: Any, config: EvicPressConfig = CONFIG) -> str:
    with pytest.raises(UnsupportedError) as raised:
        unsupported.check(server_args, config)
    sentence = str(raised.value)
    assert text in sentence
    assert "\n" not in sentence
    return sentence


def test_plain_arguments_pass(server_args: Any) -> None:
    unsupported.check(server_args, CONFIG)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("attention_backend", "fa3"),
        ("attention_backend", "torch_native"),
        ("device", "cuda:1"),
        ("kv_cache_dtype", "bfloat16"),
        ("radix_cache_backend", "evicpress"),
        ("tp_size", 2),
        ("page_size", 16),
        ("enable_lora", True),
        ("enable_mixed_chunk", True),
        ("enable_deterministic_inference", True),
    ],
)
def test_what_works_passes(server_args: Any, attribute: str, value: Any) -> None:
    assert hasattr(server_args, attribute)
    setattr(server_args, attribute, value)
    unsupported.check(server_args, CONFIG)


@pytest.mark.parametrize("row", unsupported.rows(unsupported.UNSUPPORTED), ids=lambda row: row.attribute)
def test_each_row_is_refused_by_name_with_the_way_out(server_args: Any, row: unsupported.Unsupported) -> None:
    assert hasattr(server_args, row.attribute)
    value = CONFLICTS[row.attribute]
    setattr(server_args, row.attribute, value)
    asked = row.flag if value is True else f"{row.flag} {value}"
    sentence = _refuse(f"--kv-policy evicpress cannot be combined with {asked}: {row.reason}", server_args)
    assert any(f", so {verb} " in sentence for verb in ("leave", "choose", "use", "serve", "start"))


def test_graphs_of_a_cpu_are_refused(server_args: Any) -> None:
    server_args.enable_torch_compile, server_args.device = True, "cpu"
    _refuse("--enable-torch-compile on a CPU", server_args)
    server_args.device, server_args.attention_backend = "cuda", "triton"
    unsupported.check(server_args, CONFIG)


def test_a_press_that_reads_queries_is_refused_where_a_layer_has_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [SimpleNamespace(layer_id=number) for number in (0, 2)]
    monkeypatch.setattr(unsupported, "attention_layers", lambda model: iter(layers))
    unsupported.check_every_layer(None, range(3), EvicPressConfig("evicpress", forms="keydiff@0.5"))
    reading = EvicPressConfig("evicpress", forms="keydiff@0.5,snapkv@0.3")
    with pytest.raises(unsupported.UnsupportedError, match=r"form snapkv@0.3 needs .* layer 1 of this model has no"):
        unsupported.check_every_layer(None, range(3), reading)
    layers.append(SimpleNamespace(layer_id=1))
    unsupported.check_every_layer(None, range(3), reading)


def test_unequal_backends_for_prefill_and_decode_are_refused(server_args: Any) -> None:
    server_args.attention_backend = "flashinfer"
    server_args.decode_attention_backend = "triton"
    _refuse("flashinfer for prefill and triton for decode", server_args)


def test_tiers_of_more_than_one_rank_are_refused_with_what_ranks_would_not_agree_on(server_args: Any) -> None:
    server_args.tp_size = 2
    tiers = EvicPressConfig("evicpress", host_gb=2.5, ssd_dir="/kv", ssd_gb=1.0)
    for allowed in (CONFIG, tiers, EvicPressConfig("evicpress", ssd_dir="/kv", ssd_gb=1.0)):
        unsupported.check(server_args, allowed)
    much = unsupported.memory_bytes() / 1.5e9
    sentence = _refuse(f"--kv-host-gb {much:g} with --tp-size 2 is", server_args, EvicPressConfig("lru", host_gb=much))
    assert "GB in all, and this machine has" in sentence
    unsupported.check(server_args, EvicPressConfig("evicpress", host_gb=2.5, decode=DecodeFlags(256)))
    server_args.enable_lora = True
    unsupported.check(server_args, EvicPressConfig("evicpress", host_gb=2.5))
    _refuse("--kv-ssd-dir /kv with --tp-size 2 cannot be combined with LoRA", server_args, tiers)


@pytest.mark.parametrize("score", ["tova", "h2o"])
def test_scores_by_attention_are_refused_with_more_than_one_rank(server_args: Any, score: str) -> None:
    by_attention = EvicPressConfig("evicpress", decode=DecodeFlags(score=score))
    unsupported.check(server_args, by_attention)
    server_args.tp_size = 2
    unsupported.check(server_args, EvicPressConfig("evicpress", decode=DecodeFlags(256, score="r_kv")))
    sentence = _refuse(f"--kv-decode-score {score} cannot be combined with --tp-size 2", server_args, by_attention)
    assert "choose another score, or use --tp-size 1" in sentence


def test_uneven_layers_are_refused_with_more_than_one_rank_and_with_budgets_of_running_requests(
    server_args: Any,
) -> None:
    form = Form("snapkv", 0.5, budget="pyramid")
    uneven = EvicPressConfig("evicpress", forms=(form,))
    unsupported.check(server_args, uneven)
    dropping = EvicPressConfig("evicpress", forms=(form,), decode=DecodeFlags(256))
    named = "--kv-forms snapkv@0.5:pyramid, by which layers keep different numbers of tokens, cannot be combined with"
    sentence = _refuse(f"{named} --kv-decode-budget 256", server_args, dropping)
    assert "leave out one of the two" in sentence
    server_args.tp_size = 2
    sentence = _refuse(f"{named} --tp-size 2", server_args, uneven)
    assert "leave out the layer budget, or use --tp-size 1" in sentence


@pytest.mark.parametrize("tokens", [0, 256])
def test_a_score_by_geometry_is_refused_without_a_file(server_args: Any, tokens: int) -> None:
    decode = DecodeFlags(tokens, score="geometry")
    text = "kv_decode_score 'geometry' goes by the geometry of queries, which this server was not given: start it with"
    _refuse(text, server_args, EvicPressConfig("evicpress", decode=decode))
    unsupported.check(server_args, EvicPressConfig("evicpress", decode=decode, geometry="/geometry"))


def test_slot_checks_are_refused_with_ranks(server_args: Any) -> None:
    config = EvicPressConfig("evicpress", slot_checks=0.1)
    unsupported.check(server_args, config)
    server_args.tp_size = 2
    _refuse("--kv-slot-checks 0.1 cannot be combined with --tp-size 2", server_args, config)


def test_each_flag_is_one_of_sglangs() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert [row.flag for row in unsupported.rows(unsupported.UNSUPPORTED) if row.flag not in flags] == []


def test_each_row_has_a_conflict_here() -> None:
    assert [row.attribute for row in unsupported.UNSUPPORTED] == list(CONFLICTS)
    assert [row.attribute for row in unsupported.UNSUPPORTED_ENVIRONMENT] == list(ENVIRONMENT_CONFLICTS)


@pytest.mark.parametrize("row", unsupported.rows(unsupported.UNSUPPORTED_ENVIRONMENT), ids=lambda row: row.attribute)
def test_each_environment_row_is_refused(
    server_args: Any, row: unsupported.Unsupported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(row.attribute, ENVIRONMENT_CONFLICTS[row.attribute])
    _refuse(f"cannot be combined with {row.flag}", server_args)


def test_snapkv_is_refused_with_a_full_prefill_graph(server_args: Any) -> None:
    snapkv = EvicPressConfig("evicpress", forms=(Form("keydiff", 0.5), Form("snapkv", 0.5)))
    unsupported.check(server_args, snapkv)
    server_args.cuda_graph_backend_prefill = "full"
    unsupported.check(server_args, CONFIG)
    _refuse("--kv-forms snapkv@0.5 cannot be combined with --cuda-graph-backend-prefill full", server_args, snapkv)


def test_snapkv_is_refused_with_a_full_prefill_graph_in_the_resolved_config(server_args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    server_args.cuda_graph_config = CudaGraphConfig.from_dict({"prefill": {"backend": "full"}})
    _refuse("snapkv@0.2", server_args, EvicPressConfig("evicpress", forms=(Form("snapkv", 0.2),)))


@pytest.mark.parametrize(("name", "value"), [("enable_deterministic_inference", True), ("rl_on_policy_target", "fsdp")])
def test_flashinfer_is_refused_where_it_keeps_no_prefixes(server_args: Any, name: str, value: Any) -> None:
    setattr(server_args, name, value)
    server_args.attention_backend = "triton"
    unsupported.check(server_args, CONFIG)
    server_args.attention_backend = "flashinfer"
    _refuse("so give --attention-backend triton or fa3", server_args)
    server_args.disable_radix_cache = True  # as SGLang does then: not what was asked for
    _refuse("so give --attention-backend triton or fa3", server_args)


def test_torch_native_is_refused_on_cuda(server_args: Any) -> None:
    server_args.attention_backend, server_args.device = "torch_native", "cpu"
    unsupported.check(server_args, CONFIG)
    server_args.device = "cuda:1"
    _refuse("so choose flashinfer, triton or fa3", server_args)


def test_tiers_are_refused_with_a_full_prefill_graph(server_args: Any) -> None:
    tiers = EvicPressConfig("evicpress", host_gb=2.0)
    unsupported.check(server_args, tiers)
    server_args.cuda_graph_backend_prefill = "full"
    _refuse("--kv-host-gb 2 cannot be combined with --cuda-graph-backend-prefill full", server_args, tiers)
    server_args.cuda_graph_backend_prefill = "breakable"
    unsupported.check(server_args, tiers)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}


def _model_config(folder: Path, **values: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    (folder / "config.json").write_text(json.dumps(LLAMA | values), encoding="utf-8")
    return ModelConfig(str(folder))


def test_a_model_with_full_attention_passes(tmp_path: Path) -> None:
    unsupported.check_model_config(_model_config(tmp_path))


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"attention_chunk_size": 128}, "chunked local attention"),
        ({"is_hybrid_swa": True, "sliding_window": 128}, "sliding-window layers"),
        ({"attn_temperature_len": 1024}, "scales attention by position"),
        ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "falcon_h1 layers"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 128,
                "max_window_layers": 1,
            },
            "sliding_attention layers",
        ),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
            },
            "MLA",
        ),
        (
            {
                "architectures": ["Qwen2VLForConditionalGeneration"],
                "model_type": "qwen2_vl",
                "vision_config": {"embed_dim": 32, "hidden_size": 64, "depth": 1, "num_heads": 2},
            },
            "images, video or audio",
        ),
        (
            {
                "architectures": ["Qwen2AudioForConditionalGeneration"],
                "model_type": "qwen2_audio",
                "text_config": {key: LLAMA[key] for key in LLAMA if key != "architectures"} | {"model_type": "qwen2"},
            },
            "images, video or audio",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path, values: dict[str, Any], what: str) -> None:
    model_config = _model_config(tmp_path, **values)
    with pytest.raises(UnsupportedError, match=what) as raised:
        unsupported.check_model_config(model_config)
    assert model_config.hf_config.architectures[0] in str(raised.value)
    assert "start without --kv-policy" in str(raised.value)


def test_an_unused_sliding_window_passes(tmp_path: Path) -> None:
    values = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 128}
    unsupported.check_model_config(_model_config(tmp_path, **values, use_sliding_window=False))


def test_what_only_the_scheduler_knows_is_refused(tmp_path: Path) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, PageMajorMHATokenToKVPool

    model_config = _model_config(tmp_path)
    pool = MHATokenToKVPool(
        size=8, page_size=1, dtype=torch.float32, head_num=1, head_dim=4, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    unsupported.check_model(model_config, pool, False, False)
    for swa, ssm, what in ((True, False, "sliding-window layers"), (False, True, "Mamba layers")):
        with pytest.raises(UnsupportedError, match=what):
            unsupported.check_model(model_config, pool, swa, ssm)
    with pytest.raises(UnsupportedError, match="PageMajorMHATokenToKVPool"):
        unsupported.check_model(model_config, object.__new__(PageMajorMHATokenToKVPool), False, False)
    pool.kv_cache_layout = "hnd"
    with pytest.raises(UnsupportedError, match="layout hnd"):
        unsupported.check_model(model_config, pool, False, False)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sliding_window_size": 16}, "has a sliding window"),
        ({"use_irope": True}, "has chunked local attention"),
        ({"is_cross_attention": True}, "is cross attention"),
        ({"attn_type": "ENCODER_ONLY"}, "is encoder_only attention"),
    ],
)
def test_an_attention_layer_that_needs_positions_is_refused(options: dict[str, Any], what: str) -> None:
    import torch
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    if "attn_type" in options:
        options = {"attn_type": AttentionType[options["attn_type"]]}
    plain = RadixAttention(2, 8, 1.0, num_kv_heads=1, layer_id=0)
    unsupported.check_layers(torch.nn.ModuleList([plain]))
    other = RadixAttention(2, 8, 1.0, num_kv_heads=1, layer_id=7, **options)
    with pytest.raises(UnsupportedError, match=f"layer 7 {what}"):
        unsupported.check_layers(torch.nn.ModuleList([plain, other]))
    fallback = torch.nn.Module()  # to transformers' own code: its layers are beside the modules
    fallback.attention_instances = {0: plain}
    unsupported.check_layers(fallback)
    fallback.attention_instances[7] = other
    with pytest.raises(UnsupportedError, match=f"layer 7 {what}"):
        unsupported.check_layers(fallback)


def test_the_scale_of_attention_is_the_one_that_a_model_has_by_now() -> None:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_evicpress.patches.cache.factory import attention_scale

    layer = RadixAttention(2, 8, 1.0, num_kv_heads=1, layer_id=0)
    fallback = torch.nn.Module()
    fallback.attention_instances = {0: layer}
    for model in (torch.nn.ModuleList([layer]), fallback):
        layer.scaling = 1.0
        scale = attention_scale(model)
        assert scale is not None and scale() == 1.0
        layer.scaling = 0.25  # as the fallback does in its first pass
        assert scale() == 0.25
    assert attention_scale(torch.nn.Module()) is None
