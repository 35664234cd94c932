"""What KV depends on besides the tokens: the model's weights and shape, how positions enter, and how it is stored."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from sglang_evicpress.tiers.identity import fingerprint

_SAMPLES = 64
"""Values of every weight that are looked at: a fine-tuned model differs in nearly all."""


def model_identity(model: torch.nn.Module, model_config: Any, pool: Any, page_size: int, rank: int, size: int) -> bytes:
    """16 bytes that another model, dtype, layout or rank does not have. Nothing of it depends on where files lie."""
    config = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return fingerprint(
        {
            "config": {name: repr(value) for name, value in config.items()},
            "weights": _weights_digest(model),
            "kv_dtype": str(pool.dtype),
            "layers": [pool.start_layer, pool.layer_num],
            "page_size": page_size,
            "rank": [rank, size],
        }
    )


def _weights_digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().view(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
