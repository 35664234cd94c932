"""Checkpoints of families whose code is not in transformers, made from those of an equal model that is.

Each conversion takes the settings of ``config.json`` and the weights by name, and returns both as SGLang's class for
the family reads them. Nothing of the arithmetic changes, so the answers must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Config: TypeAlias = dict[str, object]
Weights: TypeAlias = dict[str, Tensor]
Conversion: TypeAlias = Callable[[Config, Weights], tuple[Config, Weights]]

REMOTE_MODULE = "configuration_served"
REMOTE_CODE = "from transformers import PretrainedConfig\n\n\nclass ServedConfig(PretrainedConfig):\n    pass\n"
"""Lies beside checkpoints whose configuration neither transformers nor SGLang has: they say ``auto_map``."""

DYNAMIC_FACTOR = 4.0


def number(config: Config, name: str) -> float:
    """A setting that must be a number. Raises ValueError for any other."""
    value = config[name]
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}: expected a number")
    return value


def heads_of(config: Config) -> tuple[int, int, int]:
    """Query heads, KV heads, and the size of one."""
    heads = int(number(config, "num_attention_heads"))
    return heads, int(number(config, "num_key_value_heads")), int(number(config, "hidden_size")) // heads


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Every part of a name that ``names`` has, replaced in their order."""
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = weight
    return found


def remote(config: Config, architecture: str, model_type: str, **more: object) -> Config:
    """Settings whose class comes with the checkpoint."""
    kept = {name: value for name, value in config.items() if name != "rope_parameters"}
    auto_map = {"AutoConfig": f"{REMOTE_MODULE}.ServedConfig"}
    told = {"architectures": [architecture], "model_type": model_type, "auto_map": auto_map}
    return {**kept, **told, "rope_theta": 10000.0, **more}


def dynamic_rope(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """The reference has a fixed base; SGLang makes the same of a smaller one and the factor."""
    _, _, dim = heads_of({**config, "hidden_size": number(config, "head_dim") * number(config, "num_attention_heads")})
    grown: float = (DYNAMIC_FACTOR * DYNAMIC_FACTOR - (DYNAMIC_FACTOR - 1)) ** (dim / (dim - 2))
    told = {"rope_type": "dynamic", "rope_theta": 10000.0 / grown, "factor": DYNAMIC_FACTOR}
    return {**config, "rope_parameters": told}, weights


def internlm2(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """``wqkv`` has, of every KV head, the queries of its group, its key and its value."""
    heads, kv_heads, dim = heads_of(config)
    made = {}
    for name, weight in weights.items():
        if "q_proj" in name:
            others = [weights[name.replace("q_proj", other)] for other in ("k_proj", "v_proj")]
            parts = [part.view(kv_heads, -1, dim, part.shape[-1]) for part in (weight, *others)]
            made[name.replace("q_proj", "wqkv")] = torch.cat(parts, 1).reshape(-1, weight.shape[-1])
        elif "k_proj" not in name and "v_proj" not in name:
            made[name] = weight
    names = {"self_attn": "attention", "o_proj": "wo", "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3"}
    names |= {"down_proj": "w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"embed_tokens": "tok_embeddings", "lm_head": "output"}
    return remote(config, "InternLM2ForCausalLM", "internlm2", bias=False), renamed(made, names)


def internlm3(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return remote(config, "InternLM3ForCausalLM", "internlm3", bias=False, qkv_bias=False), weights


def baichuan2(config: Config, weights: Weights) -> tuple[Config, Weights]:
    made = {}
    for name, weight in weights.items():
        if "q_proj" in name:
            parts = [weight, *(weights[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))]
            made[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            made[name] = weight
    return remote(config, "BaichuanForCausalLM", "baichuan"), made


def orion(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return remote(config, "OrionForCausalLM", "orion", rms_norm_eps=config["layer_norm_eps"]), weights


def exaone(config: Config, weights: Weights) -> tuple[Config, Weights]:
    names = {"model.layers": "transformer.h", "self_attn.o_proj": "self_attn.out_proj", "self_attn": "attn.attention"}
    names |= {"gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj", "model.norm": "transformer.ln_f"}
    names |= {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "model.embed_tokens": "transformer.wte"}
    told = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": config["num_hidden_layers"]}
    told |= {"layer_norm_epsilon": config["rms_norm_eps"], "activation_function": "silu", "rope_theta": 10000.0}
    kept = {name: value for name, value in config.items() if name not in ("rope_parameters", "num_hidden_layers")}
    return {**kept, **told}, renamed(weights, names)


def minicpm(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """A Granite with the usual scale of attention, its multipliers in other words."""
    depth = number(config, "residual_multiplier") * math.sqrt(number(config, "num_hidden_layers"))
    base = number(config, "hidden_size") / number(config, "logits_scaling")
    told = {"scale_emb": config["embedding_multiplier"], "scale_depth": depth, "dim_model_base": base}
    return remote(config, "MiniCPMForCausalLM", "minicpm", **told), weights
