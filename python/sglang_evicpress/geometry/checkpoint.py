"""Digest of a model's checkpoint, by which a file that was made of it is told from those of other models."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from transformers.utils import cached_file

SAMPLES = 16
SAMPLE_BYTES = 1 << 16

_KINDS = ("*.safetensors", "*.bin", "*.pt")
_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt")  # of the model, its tokenizer, chats and generation
_MOST_SETTING_BYTES = 64 << 20


def folder_of(model: str, revision: str | None = None) -> Path:
    """Folder of a model's files: the path itself, or that of a name in the local cache of the Hugging Face hub. Raises
    ValueError where there is none."""
    if Path(model).is_dir():
        return Path(model)
    try:
        config = cached_file(model, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        raise ValueError(
            f"model {model!r} has no folder here, nor one in the cache of the Hugging Face hub: expected its weights"
        ) from None
    if config is None:
        raise ValueError(f"model {model!r} has no config.json: expected a folder with its weights")
    return Path(config).parent


def digest_of(folder: Path) -> str:
    """32 hex digits: of the name and size of every file of weights, its first and last bytes and ``SAMPLES`` parts
    between, of ``SAMPLE_BYTES`` each. A model that was fine-tuned as a whole has others; no more than about 1 MiB of a
    file is read, so that one of which a few layers were changed may not.

    Raises ValueError for a folder without weights.
    """
    paths = next((found for kind in _KINDS if (found := sorted(folder.glob(kind)))), [])
    if not paths:
        raise ValueError(f"model folder {str(folder)!r} has no weights: expected one of {', '.join(_KINDS)}")
    hashed = sha256()
    for path in paths:
        size = path.stat().st_size
        hashed.update(f"{path.name}\0{size}\0".encode())
        last = max(0, size - SAMPLE_BYTES)
        with path.open("rb") as file:
            for number in range(SAMPLES + 1):
                file.seek(last * number // SAMPLES)
                hashed.update(file.read(SAMPLE_BYTES))
    return hashed.hexdigest()[:32]


def settings_digest(folder: Path) -> str:
    """16 hex digits: of the small files beside the weights, which say how the model is run and spoken to."""
    hashed = sha256()
    for path in sorted(path for kind in _SETTINGS for path in folder.glob(kind)):
        if path.stat().st_size <= _MOST_SETTING_BYTES:
            hashed.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]
