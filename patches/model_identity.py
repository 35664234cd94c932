"""What KV depends on besides the tokens: the model's weights and shape, how positions enter, and how it is stored."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from sglang_evicpress.profiler.profile import FORMS_VERSION
from sglang_evicpress.tiers.identity import fingerprint

_SAMPLES = 64
"""Values of every weight that are looked at: a fine-tuned model differs in nearly all."""


def model_identity(model: torch.nn.Module, model_config: Any, pool: Any, page_size: int, rank: int, size: int) -> bytes:
    """16 bytes that another model, dtype, layout or rank does not have. Nothing of it depends on where files lie."""
    return fingerprint(
        {
            "config": _config_of(model_config),
            "weights": _weights_digest(model),
            "kv_dtype": str(pool.dtype),
            "layers": [pool.start_layer, pool.layer_num],
            "page_size": page_size,
            "rank": [rank, size],
        }
    )


def profile_identity(model: torch.nn.Module, model_config: Any, pool: Any, tokenizer: Any, group: Any) -> bytes:
    """16 bytes that another model, tokenizer, KV dtype or version of the forms does not have: what is measured of one
    says nothing of another. The same on every rank of ``group`` (None when there is one): rank 0's."""
    identity = fingerprint(
        {
            "config": _config_of(model_config),
            "weights": _weights_digest(model),
            "kv_dtype": str(pool.dtype),
            "tokenizer": _tokenizer_digest(tokenizer),
            "forms": FORMS_VERSION,
        }
    )
    return agreed(identity, group)


def agreed(value: bytes, group: Any) -> bytes:
    """What rank 0 of ``group`` has; ``value`` itself when there is one rank (None)."""
    if group is None:
        return value
    given = [value]
    dist.broadcast_object_list(given, src=dist.get_global_rank(group, 0), group=group)
    return given[0]


def _config_of(model_config: Any) -> dict[str, str]:
    config = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return {name: repr(value) for name, value in config.items()}


def _tokenizer_digest(tokenizer: Any) -> str:
    """Of all its rules where it can say them, else of its vocabulary; requests may come as tokens without one."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        text = backend.to_str()
    else:
        text = repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _weights_digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().view(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
