"""The contexts that are asked about: read from a file, or from what a command prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_evicpress.benchmark.config import Config


@dataclass(frozen=True, slots=True)
class Question:
    """``answer`` is the true one, where it is known."""

    text: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class Context:
    """``tokens`` as the model's tokenizer counts them, or the file says."""

    text: str
    questions: tuple[Question, ...]
    family: str
    tokens: int


def load_contexts(config: Config, folder: Path) -> list[Context]:
    """All that are not too long. What a command prints is kept in ``folder`` and not made again. Raises ValueError."""
    raise NotImplementedError
