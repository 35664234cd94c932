"""Tiny random checkpoints that hang on every survivor: attention is peaky, and its outcome counts.

One wrong survivor then moves an answer by far more than rounding does.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from evicbench.families.conversion import REMOTE_CODE, REMOTE_MODULE
from evicbench.families.table import Family

SEED = 20251125
PEAKY, HEAD, ATTENTION, OTHER = 1.7, 2.5, 1.5, 0.6
"""Spread of a matrix's outcomes over inputs of spread 1: queries and keys, logits, all else of attention, the rest."""

EMBEDDING, TIED = 1.0, 0.25
NOISE = 0.1

_EMBEDDINGS = re.compile(r"embed(_tokens|_in|_positions)?\.|\bw[tp]e\.")
_HEAD = re.compile(r"lm_head|embed_out")
_QUERY_OR_KEY = re.compile(r"\b[qk]_proj|(?<!a)\b(query|key)\b")
_ATTENTION = re.compile(r"attn|attention")
_QK_NORM = re.compile(r"\b([qk]|q_layer|k_layer|query_layer|key_layer)_?(norm|layernorm)")
_NORM = re.compile(r"norm|ln_")


def write(family: Family, folder: Path) -> tuple[Path, Path]:
    """Write a family's model below ``folder``: the one that transformers reads, and the one that SGLang reads."""
    config = AutoConfig.for_model(family.model_type, **family.settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, generator, is_tied)
    reference = folder / "reference"
    model.save_pretrained(reference)
    return reference, reference if family.served is None else _converted(family, reference, folder / "served")


def _draw(name: str, parameter: Tensor, generator: torch.Generator, is_tied: bool) -> None:
    """Spreads go by what the name says; of norms, and of all that has one dimension, the first values stay, with noise
    about them. The bias of logits (Phi, GPT-J) is none: SGLang does not add it."""
    if _HEAD.search(name) and name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() < 2 or _NORM.search(name):
        noise = torch.empty_like(parameter).normal_(0.0, NOISE, generator=generator)
        peak = PEAKY if _QK_NORM.search(name) and name.endswith("weight") else 1.0
        parameter.copy_(peak * (parameter + noise))
    elif _EMBEDDINGS.search(name):
        parameter.normal_(0.0, TIED if is_tied else EMBEDDING, generator=generator)
    else:
        gain = OTHER
        if _HEAD.search(name):
            gain = HEAD
        elif _QUERY_OR_KEY.search(name):
            gain = PEAKY
        elif _ATTENTION.search(name):
            gain = ATTENTION
        fan_in = parameter.shape[0] if re.search(r"\.c_(attn|proj|fc)\.", name) else parameter.shape[-1]
        parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)


def _converted(family: Family, reference: Path, folder: Path) -> Path:
    shutil.copytree(reference, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    assert family.served is not None
    config, weights = family.served(config, weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    if "auto_map" in config:
        (folder / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")
    return folder
