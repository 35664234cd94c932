"""Table of model families: the configuration of a tiny model of each, and what it covers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from evicbench.families import conversion

Settings: TypeAlias = dict[str, object]

VOCABULARY = 320
CONTEXT = 4096
LAYERS = 2
BOTH = ("keydiff@0.5", "snapkv@0.5")
FALLBACK = "SGLang's fallback to transformers' own code"


@dataclass(frozen=True, slots=True)
class Family:
    """``model_type`` and ``settings`` are of transformers' configuration, and of the model that answers are compared
    with. ``served``: rewrites its checkpoint into the one that SGLang reads, where transformers has no such class.
    ``forms``: two that nodes are compressed to. ``arguments``: further ones of the server."""

    name: str
    model_type: str
    settings: Settings
    covers: str
    served: conversion.Conversion | None = None
    forms: tuple[str, str] = BOTH
    arguments: tuple[str, ...] = ()
    sees_queries: bool = True


def text(hidden: int, heads: int, kv_heads: int, **more: object) -> Settings:
    """Settings that nearly all configurations share; ``more`` wins."""
    return {
        **{"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 192, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": CONTEXT},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
        **more,
    }


def gpt(heads: int, **more: object) -> Settings:
    """The same in the words of GPT-2 and what came from it."""
    return {
        **{"vocab_size": VOCABULARY, "n_embd": 128, "n_inner": 256, "n_layer": LAYERS, "n_head": heads},
        **{"n_positions": CONTEXT, "bos_token_id": 1, "eos_token_id": 2},
        **more,
    }


def rope(kind: str, **more: object) -> Settings:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def experts(**more: object) -> Settings:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, **more}


_LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=1024)
_SHORT = [1.0 + 0.02 * index for index in range(48)]
_LONG = [1.0 + 0.4 * index for index in range(48)]
_LONGROPE = rope("longrope", short_factor=_SHORT, long_factor=_LONG, original_max_position_embeddings=2048)
_MULTIPLIERS: Settings = {"embedding_multiplier": 12.0, "residual_multiplier": 0.9, "logits_scaling": 2.0}
_MINICPM: Settings = {**_MULTIPLIERS, "attention_multiplier": 64**-0.5}

FAMILIES = (
    Family("llama", "llama", text(128, 8, 2, head_dim=64, **_LLAMA3), "GQA 4, RoPE scaled as llama3, untied"),
    Family(
        "llama-linear",
        "llama",
        text(128, 2, 2, attention_bias=True, tie_word_embeddings=True, **rope("linear", factor=4.0)),
        "MHA, linear RoPE, bias in attention, tied",
    ),
    Family(
        "llama-dynamic",
        "llama",
        text(128, 4, 1, head_dim=64, **rope("default")),
        "MQA, dynamic NTK as SGLang reads it: one base for all lengths",
        conversion.dynamic_rope,
    ),
    Family("qwen2", "qwen2", text(448, 7, 1, **_YARN), "GQA 7, bias of q, k and v, YaRN"),
    Family("qwen3", "qwen3", text(128, 4, 2, head_dim=128, tie_word_embeddings=True), "QK norm per head, head_dim 128"),
    Family("qwen2-moe", "qwen2_moe", text(128, 2, 2, shared_expert_intermediate_size=96, **experts()), "experts"),
    Family("qwen3-moe", "qwen3_moe", text(128, 4, 2, head_dim=64, **experts()), "experts, QK norm"),
    Family("mistral", "mistral", text(128, 4, 1, head_dim=128, sliding_window=None), "GQA 4, head_dim 128"),
    Family("mixtral", "mixtral", text(128, 2, 1, num_local_experts=4), "experts, GQA 2"),
    Family("phi", "phi", text(128, 2, 2, partial_rotary_factor=0.5), "partial RoPE, bias, parallel blocks, LayerNorm"),
    Family("phi3", "phi3", text(192, 2, 2, sliding_window=None), "q, k and v in one, head_dim 96"),
    Family(
        "phi3-longrope",
        "phi3",
        text(256, 2, 1, sliding_window=None, partial_rotary_factor=0.75, **_LONGROPE),
        "GQA 2, head_dim 128, partial RoPE, LongRoPE below its first length",
    ),
    Family("olmo", "olmo", text(128, 2, 2, clip_qkv=4.0), "LayerNorm without weights, clipped q, k and v"),
    Family("olmo2", "olmo2", text(256, 4, 2), "QK norm over all heads, norms after each block"),
    Family("olmoe", "olmoe", text(128, 2, 2, num_experts=4, num_experts_per_tok=2), "experts, QK norm over all heads"),
    Family(
        "granite",
        "granite",
        text(256, 4, 2, attention_multiplier=0.25, **_MULTIPLIERS),
        "scale of attention that is not head_dim ** -0.5, scaled embeddings, residuals and logits",
    ),
    Family("internlm2", "llama", text(256, 4, 2), "q, k and v of each group in one", conversion.internlm2),
    Family("internlm3", "llama", text(128, 4, 2, head_dim=64), "head_dim of its own", conversion.internlm3),
    Family("gemma", "gemma", text(128, 2, 1, head_dim=256, tie_word_embeddings=True), "MQA, head_dim 256, tied"),
    Family(
        "stablelm",
        "stablelm",
        text(128, 2, 2, partial_rotary_factor=0.25, use_qkv_bias=True),
        "a quarter of each head under RoPE, bias of q, k and v, LayerNorm",
    ),
    Family("orion", "stablelm", text(256, 4, 2, partial_rotary_factor=1.0), "LayerNorm, GQA 2", conversion.orion),
    Family("starcoder2", "starcoder2", text(256, 4, 1, tie_word_embeddings=True), "GQA 4, LayerNorm, bias, tied"),
    Family("gpt2", "gpt2", gpt(2), "learned positions instead of RoPE"),
    Family("gpt-bigcode", "gpt_bigcode", gpt(2, multi_query=True), "MQA, learned positions"),
    Family(
        "gpt-j",
        "gptj",
        gpt(2, rotary_dim=32, tie_word_embeddings=False),
        "partial and interleaved RoPE",
        forms=("keydiff@0.5", "value_key_ratio@0.5"),
        sees_queries=False,
    ),
    Family(
        "cohere",
        "cohere",
        text(256, 4, 2, use_qk_norm=True, logit_scale=0.5, tie_word_embeddings=True),
        "interleaved RoPE, QK norm with weights per head, parallel blocks, tied",
    ),
    Family("exaone", "llama", text(256, 4, 2), "names as in GPT-2", conversion.exaone),
    Family(
        "exaone4",
        "exaone4",
        text(256, 4, 2, sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * LAYERS),
        "QK norm, norms after each block",
    ),
    Family("minicpm", "granite", text(256, 4, 2, **_MINICPM), "scaled embeddings and residuals", conversion.minicpm),
    Family("ernie4.5", "ernie4_5", text(128, 4, 2, head_dim=64), "interleaved RoPE"),
    Family(
        "glm4",
        "glm4",
        text(128, 4, 2, head_dim=64, **rope("default", partial_rotary_factor=0.5)),
        "partial and interleaved RoPE, four norms a layer",
    ),
    Family(
        "baichuan2",
        "llama",
        text(4096, 32, 32, num_hidden_layers=1),
        "q, k and v in one, 32 KV heads of 128 (its class takes RoPE for a hidden size of 4096 alone)",
        conversion.baichuan2,
    ),
    Family("hunyuan", "hunyuan_v1_dense", text(128, 4, 2, head_dim=64), "QK norm after RoPE"),
    Family("arcee", "arcee", text(128, 4, 2, head_dim=64), "squared ReLU"),
    Family("apertus", "apertus", text(256, 4, 2), "xIELU, QK norm"),
    Family("persimmon", "persimmon", text(128, 2, 2), "QK norm, partial RoPE, squared ReLU"),
    Family("opt", "opt", text(128, 2, 2, ffn_dim=256, word_embed_proj_dim=128), "learned positions, ReLU"),
    Family("smollm3", "smollm3", text(128, 4, 2, no_rope_layers=[1, 0]), f"{FALLBACK}; a layer without RoPE"),
    Family("gpt-neox", "gpt_neox", text(128, 2, 2, rotary_pct=0.25), f"{FALLBACK}; partial RoPE, parallel blocks"),
    Family("seed-oss", "seed_oss", text(128, 4, 2, head_dim=64), f"{FALLBACK}; bias of q, k and v"),
    Family(
        "granite-fallback",
        "granite",
        text(256, 4, 2, attention_multiplier=0.25, embedding_multiplier=12.0),  # it leaves logits unscaled
        f"{FALLBACK}; scale of attention that is not head_dim ** -0.5",
        arguments=("--model-impl", "transformers"),
    ),
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A family that is refused at start; ``says``: words of the sentence."""

    name: str
    model_type: str
    architecture: str
    says: str
    settings: Settings = field(default_factory=dict)


_MLA: Settings = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
_SLIDING = ["sliding_attention", "full_attention"]

REFUSED = (
    Refused("gemma2", "gemma2", "Gemma2ForCausalLM", "sliding", text(128, 2, 1, layer_types=_SLIDING)),
    Refused("gemma3", "gemma3_text", "Gemma3ForCausalLM", "sliding", text(128, 2, 1, layer_types=_SLIDING)),
    Refused("gpt-oss", "gpt_oss", "GptOssForCausalLM", "sliding", text(128, 2, 1, num_local_experts=4)),
    Refused("cohere2", "cohere2", "Cohere2ForCausalLM", "sliding", text(128, 2, 1, layer_types=_SLIDING)),
    Refused("deepseek-v2", "deepseek_v2", "DeepseekV2ForCausalLM", "(MLA)", text(128, 2, 2, v_head_dim=32, **_MLA)),
    Refused("qwen3-next", "qwen3_next", "Qwen3NextForCausalLM", "linear", text(128, 2, 1)),
    Refused("falcon-h1", "falcon_h1", "FalconH1ForCausalLM", "falcon_h1 layers", text(128, 2, 1)),
    Refused("llama4", "llama4_text", "Llama4ForCausalLM", "chunked", text(128, 2, 1, head_dim=64)),
    Refused("qwen2-vl", "qwen2_vl", "Qwen2VLForConditionalGeneration", "images"),
)
