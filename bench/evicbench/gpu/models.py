"""Model folders with the shapes of real models and no weights, for ``--load-format dummy``; nothing is downloaded.

The tokenizer is ours: one token a byte, two more for begin and end. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Model:
    """Model as a server needs to know it; the field names but ``name`` and ``architecture`` are those of its
    ``config.json``."""

    name: str
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_scaling: dict[str, float | int | str] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, in bfloat16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * ELEMENT_BYTES


LLAMA_8B = Model(
    name="llama-3.1-8b",
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope_scaling={
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
)
QWEN_14B = Model(
    name="qwen2.5-14b",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1000000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
)
MODELS = (LLAMA_8B, QWEN_14B)

BOS, EOS = 256, 257
_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write_model(model: Model, folder: Path) -> Path:
    """Write ``config.json`` and the tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in asdict(model).items() if key not in ("name", "architecture")}
    config |= {"architectures": [model.architecture], "torch_dtype": "bfloat16", "hidden_act": "silu"}
    config |= {"tie_word_embeddings": False, "attention_dropout": 0.0, "use_cache": True, "initializer_range": 0.02}
    config |= {"bos_token_id": BOS, "eos_token_id": EOS}
    if model.rope_scaling is None:
        del config["rope_scaling"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", _byte_tokenizer())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    return folder


def _byte_tokenizer() -> dict[str, object]:
    specials = [(BOS, "<s>"), (EOS, "</s>")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags} for number, text in specials],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate(_byte_alphabet())} | {t: n for n, t in specials},
            "merges": [],
        },
    }


def _byte_alphabet() -> list[str]:
    """The visible character that stands for each byte in a byte-level tokenizer, by byte."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in visible else next(stand_ins)) for byte in range(256)]


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
