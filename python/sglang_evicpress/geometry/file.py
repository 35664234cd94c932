"""File of a geometry: safetensors, one for each model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sglang_evicpress.files import write_whole
from sglang_evicpress.geometry.centres import ModelFacts, QueryGeometry
from sglang_evicpress.geometry.rope import Rope

FORMAT = "evicpress geometry 1"
EXPECTED = "a file that evicpress calibrate geometry has written"

_TENSORS = ("centres", "inv_freq", "lengths")


def write(path: str, geometry: QueryGeometry) -> None:
    """Write the file, whole or not at all. Raises ValueError as ``files.write_whole``."""
    rope = geometry.rope
    about = {
        "model": asdict(geometry.model),
        "is_interleaved": rope.is_interleaved,
        "factor": rope.factor,
        "num_tokens": geometry.num_tokens,
        "max_offset": geometry.max_offset,
    }
    tensors = {"centres": geometry.centres, "lengths": geometry.lengths, "inv_freq": rope.inv_freq}
    data = save({name: each.cpu().contiguous() for name, each in tensors.items()}, {FORMAT: json.dumps(about)})
    write_whole(path, data)


def read(path: str) -> QueryGeometry:
    """The geometry of a file. Raises ValueError, one sentence that names the file, where it is none."""
    where = f"geometry {path!r}"
    if not Path(path).is_file():
        raise ValueError(f"{where} is no file: expected {EXPECTED}")
    try:
        with safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get(FORMAT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{where} cannot be read ({error}): expected {EXPECTED}") from None
    if about is None or set(tensors) != set(_TENSORS):
        raise ValueError(f"{where} holds {', '.join(sorted(tensors)) or 'nothing'}: expected {EXPECTED}")
    try:
        return _of(json.loads(about), tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged ({error}): expected {EXPECTED}") from None


def _of(about: Mapping[str, object], tensors: Mapping[str, Tensor]) -> QueryGeometry:
    model, factor = about["model"], about["factor"]
    if not isinstance(model, dict) or not isinstance(factor, float) or not isinstance(about["is_interleaved"], bool):
        raise ValueError(f"it is about {about!r:.100}")
    facts = ModelFacts(**model)
    counts = facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim
    num_tokens, max_offset = about["num_tokens"], about["max_offset"]
    if not isinstance(num_tokens, int) or not isinstance(max_offset, int):
        raise ValueError(f"it is about {about!r:.100}")
    texts = facts.name, facts.checkpoint
    if not all(type(n) is int and n < 2**63 for n in (*counts, num_tokens, max_offset)):
        raise ValueError(f"it is about {about!r:.100}")
    if not all(isinstance(text, str) and text.isprintable() for text in texts):  # else it has no digest
        raise ValueError(f"it is about {about!r:.100}")
    rope = Rope(tensors["inv_freq"], facts.head_dim, about["is_interleaved"], factor)
    geometry = QueryGeometry(facts, rope, tensors["centres"], tensors["lengths"], num_tokens, max_offset)
    geometry.check_values()
    return geometry
