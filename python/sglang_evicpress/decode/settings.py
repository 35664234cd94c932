"""What a request with a decode-time budget asked for, and how that is read from its custom parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

METHODS = ("paged", "repack", "holefill", "compact")
SCORES = ("value_key_ratio", "knorm", "keydiff", "streaming", "r_kv", "tova", "h2o")
QUERY_SCORES = ("tova", "h2o")
"""Scores that cannot be computed without recent queries; ``r_kv`` takes them when they are there."""
PROTECTIONS = ("first", "newest")
MAX_WINDOW = 256

_PREFIX = "kv_decode_"
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "kv_decode_budget": "tokens",
        "kv_decode_method": "method",
        "kv_decode_score": "score",
        "kv_decode_every": "every",
        "kv_decode_protect": "protect",
    }
)


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """A budget of ``tokens`` slots for a running request; 0 is no budget.

    ``method``: ``paged`` frees whole pages by their mean score (PagedEviction, section 4.3), ``repack`` and
    ``holefill`` drop single tokens ``every`` so many decoded tokens and move the survivors together (guide:
    "The compaction pass"), ``compact`` takes whichever of the two copies less. ``score`` says what survives.
    ``protect`` holds the pages that ``paged`` never frees while decoding; ``window`` is how many of the last
    queries and keys a score looks at. Raises ValueError naming the value and what is accepted.
    """

    tokens: int = 0
    method: str = "paged"
    score: str = "value_key_ratio"
    every: int = 128
    protect: tuple[str, ...] = PROTECTIONS
    window: int = 8

    def __post_init__(self) -> None:
        _check_int("kv_decode_budget", self.tokens, 0)
        if self.method == "quest":
            raise ValueError(
                "kv_decode_method 'quest' selects pages to read and keeps all of them, so it frees no memory: "
                f"choose {_either(METHODS)}"
            )
        _check_name("kv_decode_method", self.method, METHODS)
        _check_name("kv_decode_score", self.score, SCORES)
        _check_int("kv_decode_every", self.every, 1)
        _check_int("kv_decode_window", self.window, 1, MAX_WINDOW)
        if self.protect not in ((), ("first",), ("newest",), PROTECTIONS):
            raise ValueError(
                f"kv_decode_protect is {self.protect!r}: want (), ('first',), ('newest',) or both in order"
            )

    @property
    def reads_queries(self) -> bool:
        """Whether the score is lost without recent queries."""
        return self.score in QUERY_SCORES


def from_request(params: Mapping[str, object] | None, default: DecodeSettings) -> DecodeSettings | None:
    """The settings of one request: ``default`` (the server's) with what ``params`` says in its place.

    None when the result has no budget: neither side gives one, or the request sends ``kv_decode_budget`` 0.
    Keys that do not start with ``kv_decode_`` are others' and are not looked at. Raises ValueError for an
    unknown ``kv_decode_`` key, a value that is not accepted, and for a choice without a budget to apply it to.
    """
    asked = {key: value for key, value in (params or {}).items() if str(key).startswith(_PREFIX)}
    for key in asked:
        if key not in _FIELDS:
            raise ValueError(f"{key} is not known: want {_either(tuple(_FIELDS))}")
    changes = {_FIELDS[key]: value for key, value in asked.items()}
    if "protect" in changes:
        changes["protect"] = parse_protect(changes["protect"])
    settings = replace(default, **changes)  # type: ignore[arg-type]  # checked by __post_init__
    if settings.tokens:
        return settings
    if asked and "kv_decode_budget" not in asked:
        raise ValueError(f"{next(iter(asked))} without kv_decode_budget has nothing to apply to: give a budget")
    return None


def parse_protect(text: object) -> tuple[str, ...]:
    """``"first,newest"`` in either order, one of them, or ``"none"``. Raises ValueError for anything else."""
    if text == "none":
        return ()
    pages = text.split(",") if isinstance(text, str) else []
    if not pages or len(set(pages)) != len(pages) or any(page not in PROTECTIONS for page in pages):
        raise ValueError(f"kv_decode_protect is {text!r}: want 'first', 'newest', 'first,newest' or 'none'")
    return tuple(page for page in PROTECTIONS if page in pages)


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_name(key: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ValueError(f"{key} is {value!r}: want {_either(names)}")


def _check_int(key: str, value: object, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{key} is {value!r}: want a whole number, {bound}")
