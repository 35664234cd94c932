"""Flags of budgets of running requests, and what every field of the configuration is made with."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, JsonValue
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(strict=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)


def setting(default: object, expected: str, text: str | None = None, **more: Any) -> Any:
    """A field with what it ``expected``s and the help ``text`` of its flag; without a text it has a key only.

    ``key`` is its key in the config file where that is not the field's name, ``flag`` its flag where that is not
    ``--kv-KEY``, and ``shown`` how the help tells the default; the rest are limits that pydantic checks.
    """
    extra: dict[str, JsonValue] = {name: more.pop(name) for name in ("flag", "shown") if name in more}
    key = more.pop("key", None)
    return Field(default, title=expected, description=text, alias=key, json_schema_extra=extra, **more)


@dataclass(frozen=True, slots=True, config=STRICT)
class DecodeFlags:
    """Budgets of running requests, as flags and files give them; ``decode_budget.settings`` checks the values."""

    budget: int = setting(
        0,
        "a whole number",
        "Tokens of KV that a running request keeps at most. A request may ask for another budget, or 0 for none: "
        '"custom_params": {"kv_decode_budget": 1024}',
        shown="all",
        key="decode_budget",
    )
    method: str = setting(
        "paged",
        "a string",
        "How --kv-decode-budget is kept: paged frees whole pages, of at least 16 tokens; repack, holefill and compact "
        "drop single tokens and move the rest together",
        key="decode_method",
    )
    score: str = setting(
        "value_key_ratio",
        "a string",
        "What survives under --kv-decode-budget: value_key_ratio, knorm, keydiff, streaming, r_kv, geometry, which "
        "needs --kv-geometry, or tova and h2o, which keep the last queries of every request",
        key="decode_score",
    )
    interval: int = setting(
        128,
        "a whole number",
        "Tokens that may come on top of --kv-decode-budget before repack, holefill and compact drop again",
        key="decode_interval",
    )
    protected_pages: str = setting(
        "first,newest",
        "a string",
        "Pages that paged never frees: first (all with sinks), newest, first,newest or none",
        key="decode_protected_pages",
    )
    client_budgets: str = setting(
        "trace",
        "a string",
        "Choice of budgets by requests, in their custom_params: off, on, or trace, which also lets them ask for the "
        "trace of their passes",
        key="decode_client_budgets",
    )
