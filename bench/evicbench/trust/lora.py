"""Random LoRA adapters on disk, in the format that SGLang loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, SCALE = 4, 0.5
TARGETS = ("q_proj", "v_proj", "o_proj")


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of every layer's attention that moves the outputs of its matrices by about ``SCALE`` of their size."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not any(f".{target}." in name for target in TARGETS):
            continue
        num_out, num_in = weight.shape
        down = torch.randn(RANK, num_in, generator=generator) / num_in**0.5
        up = torch.randn(num_out, RANK, generator=generator)
        up *= SCALE * weight.norm() / (up @ down).norm()
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        found[f"{prefix}.lora_A.weight"], found[f"{prefix}.lora_B.weight"] = down.contiguous(), up.contiguous()
    folder.mkdir(parents=True)
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
