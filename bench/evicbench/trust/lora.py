"""Random LoRA adapters on disk, in the format that SGLang loads, and servers that take them without a GPU.

SGLang pins the memory of adapters, also those of its backend for the CPU, and PyTorch can pin only where it finds an
NVIDIA driver.
"""

from __future__ import annotations

import json
import os
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


_UNPINNED = """
import sys


class Finder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "sglang.srt.lora.layers":
            import torch

            def without(make):
                return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

            for name in ("tensor", "empty", "zeros", "ones"):
                setattr(torch, name, without(getattr(torch, name)))
            torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
        return None


sys.meta_path.insert(0, Finder())
"""


def unpinned(folder: Path) -> dict[str, str]:
    """Environment of a server that pins no memory once it has adapters: Python runs the file that is put there."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(_UNPINNED)
    return {"PYTHONPATH": os.pathsep.join((str(folder), *filter(None, [os.environ.get("PYTHONPATH")])))}
