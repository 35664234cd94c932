"""Facts from the files of a model: tokens of a text, bytes of KV of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

from sglang_evicpress.benchmark.config import Config

_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "bf16": 2}
_INSTEAD = "give kv_bytes_per_token instead"


def kv_bytes_per_token(config: Config) -> int:
    """Bytes of a token's exact KV in all layers: the config's figure, else by config.json. Raises ValueError."""
    if config.kv_bytes_per_token is not None:
        return config.kv_bytes_per_token
    where = f"{config.path}: model {config.model}"
    model = _model_config(config)
    nested = model.get("text_config")
    text = nested if isinstance(nested, Mapping) else model
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    layers, kv_heads, head_dim = (text.get(key) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    kv_heads = heads if kv_heads is None else kv_heads
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        head_dim = hidden // heads
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(head_dim, int)):
        raise ValueError(f"{where} has a config.json without the number of layers, KV heads or head_dim: {_INSTEAD}")
    dtype = _dtype(config, str(text.get("dtype") or text.get("torch_dtype") or model.get("dtype") or "float32"))
    if dtype not in _BYTES:
        raise ValueError(f"{where} would keep its KV as {dtype!r}, which is none of {', '.join(_BYTES)}: {_INSTEAD}")
    return 2 * layers * kv_heads * head_dim * _BYTES[dtype]


def make_counter(config: Config) -> Callable[[str], int]:
    """Counts the tokens of a text, those included that a tokenizer adds by itself. Raises ValueError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{config.path}: model {config.model} has no tokenizer ({error!s:.200})") from None
    return lambda text: len(tokenizer(text, verbose=False)["input_ids"])


def _dtype(config: Config, own: str) -> str:
    """That of KV, as the flags say, or SGLang chooses: half precision for a model in single precision."""
    flags = dict(pairwise(word for flag in config.server for word in flag.split("=", 1)))
    given = [flags.get(name, "auto") for name in ("--kv-cache-dtype", "--dtype")]
    chosen = next((dtype for dtype in given if dtype != "auto"), None)
    if chosen is not None:
        return chosen
    return "float16" if own == "float32" else own


def _model_config(config: Config) -> Mapping[str, object]:
    path = Path(config.model) / "config.json"
    try:
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
        else:
            from transformers import AutoConfig

            found = AutoConfig.from_pretrained(config.model).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{config.path}: model {config.model} has no config.json that can be read ({error!s:.200})"
        ) from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds {found!r:.60}: expected an object")
    return found
