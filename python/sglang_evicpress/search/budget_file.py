"""File of layer budgets: shares that a search found, which a server expands to any number of tokens.

JSON: ``{"format": "evicpress-layer-budgets", "version": 1, "num_layers": L, "shares": [L numbers, mean 1.0],
"target": tokens, "note": {...}}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from sglang_evicpress.files import read_json, write_whole

FORMAT, VERSION = "evicpress-layer-budgets", 1
MAX_LAYERS = 1024
MEAN_TOLERANCE = 1e-3
"""How far the mean of written shares may be from 1, since files hold rounded numbers."""

_KEYS = ("format", "version", "num_layers", "shares", "target", "note")
_EXPECTED = "a file that `evicpress search` has written"

_MAX_NUMBER = 1 << 31  # positions are below that


@dataclass(frozen=True, slots=True)
class BudgetFile:
    """``shares``: tokens that each layer keeps over those that a layer keeps on average, the lowest layer first, mean
    1. ``target``: that average, in tokens, where they were found. ``note``: how, for whoever reads the file; JSON.

    Raises ValueError for shares that are no finite numbers from 0 on with a mean of 1, and for a target below 1.
    """

    shares: tuple[float, ...]
    target: int
    note: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= len(self.shares) <= MAX_LAYERS:
            raise ValueError(
                f"shares has {len(self.shares)} numbers: expected one for each of 1 to {MAX_LAYERS} layers"
            )
        for layer, share in enumerate(self.shares):
            if not _is_number(share) or not 0 <= share < _MAX_NUMBER:  # also of numbers that no float holds
                raise ValueError(f"shares[{layer}] is {share!r:.100}: expected a finite number of at least 0")
        mean = math.fsum(self.shares) / len(self.shares)
        if abs(mean - 1.0) > MEAN_TOLERANCE:
            raise ValueError(f"shares have the mean {mean:.6g}: expected 1")
        if not isinstance(self.target, int) or isinstance(self.target, bool):
            raise ValueError(f"target is {self.target!r:.100}: expected a whole number of tokens of at least 1")
        if not 1 <= self.target < _MAX_NUMBER:
            raise ValueError(
                f"target is {self.target!r:.100}: expected a whole number of tokens of at least 1, below 2^31"
            )

    @classmethod
    def of(cls, budgets: Sequence[int], target: int, note: Mapping[str, object] | None = None) -> BudgetFile:
        """The file of tokens kept by layer. Raises ValueError as the class, and where no layer keeps any."""
        total = sum(budgets)
        if total < 1:
            raise ValueError(f"budgets are {tuple(budgets)}: expected one above 0")
        return cls(tuple(each * len(budgets) / total for each in budgets), target, note or {})

    @property
    def num_layers(self) -> int:
        return len(self.shares)


def write_budget_file(path: str, file: BudgetFile) -> None:
    """Write the file whole or not at all. Raises ValueError where it cannot be written, or ``note`` is no JSON."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "num_layers": file.num_layers,
        "shares": list(file.shares),
        "target": file.target,
        "note": dict(file.note),
    }
    try:
        data = orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        raise ValueError(f"note {file.note!r:.100} cannot be written ({error}): expected JSON") from None
    write_whole(path, data)


def read_budget_file(path: str) -> BudgetFile:
    """The file at ``path``. Raises ValueError, one sentence that names the path, for one that is missing or damaged."""
    where = f"layer budget file {path!r}"
    content = read_json(path, where, file=_EXPECTED, content=_EXPECTED)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{where} does not have format {FORMAT!r}: expected {_EXPECTED}")
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"{where} has version {version!r:.100}: expected {VERSION}")
    for key in content:
        if key not in _KEYS:
            raise ValueError(f"{where} has the unknown key {key!r:.100}: expected {', '.join(_KEYS)}")
    for key in _KEYS[2:5]:
        if key not in content:
            raise ValueError(f"{where} has no {key}: expected {_EXPECTED}")
    shares, note = content["shares"], content.get("note", {})
    if not isinstance(shares, list):
        raise ValueError(f"{where}: shares is {shares!r:.100}: expected a list of numbers")
    if not isinstance(note, dict):
        raise ValueError(f"{where}: note is {note!r:.100}: expected an object")
    num_layers = content["num_layers"]
    if isinstance(num_layers, bool) or num_layers != len(shares):
        raise ValueError(f"{where}: num_layers is {num_layers!r:.100}: expected {len(shares)}, as shares has numbers")
    try:
        return BudgetFile(tuple(shares), content["target"], note)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
