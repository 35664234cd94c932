"""Model folders with the shapes of real models and no weights, for ``--load-format dummy``; nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """``config``: of its ``config.json``, but for what all models here share."""

    name: str
    config: dict[str, Any]


LLAMA_8B = Model(
    "llama-3.1-8b",
    {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
            "original_max_position_embeddings": 8192,
        },
    },
)
QWEN_14B = Model(
    "qwen2.5-14b",
    {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064},
        **{"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "head_dim": 128},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
    },
)
SHARED = {
    **{"max_position_embeddings": 131072, "torch_dtype": "bfloat16", "hidden_act": "silu", "use_cache": True},
    **{"tie_word_embeddings": False, "attention_dropout": 0.0, "initializer_range": 0.02},
    **{"bos_token_id": 1, "eos_token_id": 2},
}


def write_model(model: Model, folder: Path) -> Path:
    """Write ``config.json``, all that a server with ``--skip-tokenizer-init`` reads; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHARED | model.config, indent=1) + "\n", encoding="utf-8")
    return folder
