"""The testbed's closed vocabulary, read from the model's own tokenizer: one word is one token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

MODEL_DIR = Path(__file__).resolve().parent / "model"
BOS, EOS, PAD, ASK = "<bos>", "<eos>", "<pad>", "<q>"
KEYWORDS = frozenset(("code", "boss", "log", "title", "note", "the", ".", ":", "->", ";"))
_UNUSED = frozenset(("has", "is", "top", "colours", "of"))  # in the tokenizer, in no sentence

_CONSONANT, _VOWEL = "[bdfgklmnprstvz]", "[aeiou]"
_SHAPES = {
    "names": re.compile(f"({_CONSONANT}{_VOWEL}){{2}}"),
    "values": re.compile(f"{_CONSONANT}[0-9]"),
    "nouns": re.compile(f"{_CONSONANT}{_VOWEL}{_CONSONANT}"),
    "verbs": re.compile(f"({_CONSONANT}{_VOWEL}){{2}}{_CONSONANT}"),
    "colours": re.compile(f"{_VOWEL}{_CONSONANT}{{2}}{_VOWEL}"),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Word classes in token-id order; a class is told by the shape of its words, keywords belong to none."""

    ids: Mapping[str, int]
    names: tuple[str, ...]
    values: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    colours: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of blank-separated words; raises KeyError for a word the model has never seen."""
        return [self.ids[word] for word in text.split()]


@cache
def load_vocabulary(model_dir: Path = MODEL_DIR) -> Vocabulary:
    """Read `tokenizer.json` of an exported model directory (kept for the life of the process)."""
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    words = [word for word in sorted(ids, key=ids.__getitem__) if word not in KEYWORDS | _UNUSED]
    classes = {kind: tuple(filter(shape.fullmatch, words)) for kind, shape in _SHAPES.items()}
    return Vocabulary(ids=MappingProxyType(ids), **classes)
