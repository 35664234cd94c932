"""Settings of a decode-time budget, and their reading from a request's custom parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_evicpress.decode_budget.scores import SCORES
from sglang_evicpress.error_text import short_repr

METHODS = ("paged", "repack", "holefill", "compact")
PROTECTIONS = ("first", "newest")
MAX_WINDOW = 256
MAX_TOKENS = 2**31 - 1

CLIENT_BUDGETS = ("off", "on", "trace")
"""May requests choose their budgets? ``off``: no; ``on``: yes; ``trace``: they may also ask for the trace of passes."""
LEAST_INTERVAL = 16
MOST_LEAST_INTERVAL = 32
MAX_SORTED_TOKENS = 8192
"""Budget of a request, at most, where each pass sorts the whole row; the server's own may be larger."""
TRACE = "kv_decode_trace"

_PREFIX = "kv_decode_"
_MAX_PARAMS = 256
_SORTING_METHODS = ("holefill", "compact")
_FIELDS = {
    f"{_PREFIX}budget": "tokens",
    **{f"{_PREFIX}{name}": name for name in ("method", "score", "interval", "protected_pages")},
}


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """A budget of ``tokens`` slots for a running request; 0 is no budget.

    ``method``: ``paged`` frees whole pages by their mean score (PagedEviction, section 4.3), ``repack`` and
    ``holefill`` drop single tokens ``interval`` so many decoded tokens and move the survivors together
    (see ``compaction``), ``compact`` takes whichever of the two copies less. ``score`` says what survives.
    ``protected_pages`` holds the pages that ``paged`` never frees while decoding; ``window`` is how many of the last
    queries and keys a score looks at. Raises ValueError naming the value and what is accepted.
    """

    tokens: int = 0
    method: str = "paged"
    score: str = "value_key_ratio"
    interval: int = 128
    protected_pages: tuple[str, ...] = PROTECTIONS
    window: int = 8

    def __post_init__(self) -> None:
        _check_int("kv_decode_budget", self.tokens, 0)
        if isinstance(self.method, str) and self.method == "quest":
            raise ValueError(
                "kv_decode_method 'quest' selects pages to read and keeps all of them, so it frees no memory: "
                f"choose {_either(METHODS)}"
            )
        _check_name("kv_decode_method", self.method, METHODS)
        _check_name("kv_decode_score", self.score, tuple(SCORES))
        _check_int("kv_decode_interval", self.interval, 1)
        _check_int("kv_decode_window", self.window, 1, MAX_WINDOW)
        if self.protected_pages not in ((), ("first",), ("newest",), PROTECTIONS):
            raise ValueError(
                f"kv_decode_protected_pages is {short_repr(self.protected_pages)}: expected (), ('first',), "
                "('newest',) or both in order"
            )

    @property
    def reads_queries(self) -> bool:
        """True if the score is lost without recent queries."""
        return SCORES[self.score].needs_queries

    @property
    def needs_geometry(self) -> bool:
        """True if the score goes by what was calibrated of the model's queries."""
        return SCORES[self.score].needs_geometry

    @property
    def sorts_rows(self) -> str | None:
        """The score or method that makes each pass sort the row, None for a cost linear in the row."""
        names = (SCORES[self.score].sorts_rows and self.score, self.method in _SORTING_METHODS and self.method)
        return next((name for name in names if name), None)


def fields_of(params: object) -> dict[str, object]:
    """The entries of a request's ``custom_params`` that are ours, ``kv_decode_trace`` included.

    ``params`` may be anything, since SGLang lets pass what it does not look at. Of more than 256 entries only those
    that are known are looked up: no client makes the scheduler walk over a million.
    """
    if not isinstance(params, dict):
        return {}
    if len(params) > _MAX_PARAMS:
        return {key: params[key] for key in (*_FIELDS, TRACE) if key in params}
    return {key: value for key, value in params.items() if isinstance(key, str) and key.startswith(_PREFIX)}


def client_settings(
    params: object, default: DecodeSettings, clients: str = "trace"
) -> tuple[DecodeSettings | None, bool]:
    """The budget of one request, None for none, and whether it gets a trace of its passes.

    ``default`` is the server's own, ``clients`` one of ``CLIENT_BUDGETS``. Raises ValueError, one sentence naming the
    value and what is accepted, for what ``from_request`` refuses, and for what clients may not have: anything where
    ``clients`` is ``off``, a trace where it is not ``trace``, an interval below ``least_interval``, and a budget beyond
    ``MAX_SORTED_TOKENS`` (or the server's own) where each pass would sort it.
    """
    fields = fields_of(params)
    if not fields and not default.tokens:  # the usual request, which does not wait for more
        return None, False
    if fields and clients == "off":
        raise ValueError(
            f"{short_repr(next(iter(fields)))} is given, but this server was started with "
            "--kv-decode-client-budgets off: leave it out"
        )
    wants_trace = fields.pop(TRACE, False)
    if not isinstance(wants_trace, bool):
        raise ValueError(f"{TRACE} is {short_repr(wants_trace)}: expected true or false")
    if wants_trace and clients != "trace":
        raise ValueError(f"{TRACE} is true: expected a server started with --kv-decode-client-budgets trace, or false")
    settings = from_request(fields, default)
    if settings is None:
        return None, False
    least = least_interval(default)
    if "kv_decode_interval" in fields and settings.interval < least:
        raise ValueError(f"kv_decode_interval is {settings.interval}: expected at least {least} on this server")
    most = max(MAX_SORTED_TOKENS, default.tokens)
    if fields and settings.sorts_rows and settings.tokens > most:
        raise ValueError(
            f"kv_decode_budget is {settings.tokens}: expected at most {most} with {settings.sorts_rows}, which "
            "sorts all of it in each pass"
        )
    return settings, wants_trace


def least_interval(default: DecodeSettings) -> int:
    """The shortest interval between passes, in tokens, that a client may ask for: the server's own, but at least
    ``LEAST_INTERVAL`` and never more than ``MOST_LEAST_INTERVAL``."""
    return max(LEAST_INTERVAL, min(default.interval, MOST_LEAST_INTERVAL))


def from_request(params: Mapping[str, object] | None, default: DecodeSettings) -> DecodeSettings | None:
    """The settings of one request: ``default`` (the server's) with what ``params`` says in its place.

    None when the result has no budget: neither side gives one, or the request sends ``kv_decode_budget`` 0.
    Keys that do not start with ``kv_decode_`` are others' and are not looked at. Raises ValueError for an
    unknown ``kv_decode_`` key, a value that is not accepted, and for a choice without a budget to apply it to.
    """
    asked = {key: value for key, value in (params or {}).items() if str(key).startswith(_PREFIX)}
    for key in asked:
        if key not in _FIELDS:
            shown = key if key.isidentifier() and len(key) <= 60 else short_repr(key)
            raise ValueError(f"{shown} is not known: expected {_either(tuple(_FIELDS))}")
    changes = {_FIELDS[key]: value for key, value in asked.items()}
    if "protected_pages" in changes:
        changes["protected_pages"] = parse_protected_pages(changes["protected_pages"])
    settings = replace(default, **changes)  # type: ignore[arg-type]  # checked by __post_init__
    if settings.tokens:
        return settings
    if asked and "kv_decode_budget" not in asked:
        raise ValueError(f"{next(iter(asked))} without kv_decode_budget has nothing to apply to: give a budget")
    return None


def parse_protected_pages(text: object) -> tuple[str, ...]:
    """``"first,newest"`` in either order, one of them, or ``"none"``. Raises ValueError for anything else."""
    if text == "none":
        return ()
    pages = text.split(",", len(PROTECTIONS)) if isinstance(text, str) else []
    if not pages or len(set(pages)) != len(pages) or any(page not in PROTECTIONS for page in pages):
        raise ValueError(
            f"kv_decode_protected_pages is {short_repr(text)}: expected 'first', 'newest', 'first,newest' or 'none'"
        )
    return tuple(page for page in PROTECTIONS if page in pages)


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_name(key: str, value: object, names: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{key} is {short_repr(value)}: expected {_either(names)}")


def _check_int(key: str, value: object, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or value > (MAX_TOKENS if most is None else most):
        is_large = type(value) is int and value > MAX_TOKENS
        bound = f"at least {least}" if most is None and not is_large else f"{least} to {most or MAX_TOKENS}"
        raise ValueError(f"{key} is {short_repr(value)}: expected a whole number, {bound}")
