"""Quality that requests ask for in the field ``kv_quality`` of their custom parameters, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from sglang_evicpress.error_text import short_repr

KV_QUALITY = "kv_quality"
EXACT = "exact"


def asks_exact(params: object) -> bool:
    """True if a request with these ``custom_params`` is served from exact KV only."""
    return least_quality(params) == 1.0


def least_quality(params: object) -> float:
    """The least mean quality of the KV that a request with these ``custom_params`` is served from the cache; 1 is exact
    KV only, 0 any."""
    value = params.get(KV_QUALITY) if isinstance(params, dict) else None
    if isinstance(value, int | float):
        return float(value) if _is_quality(value) else 0.0
    return 1.0 if value == EXACT else 0.0


def check_quality(params: object) -> None:
    """Raises ValueError, one sentence naming the value and what is accepted, for a quality that is not known. Without
    the field, or with None in it, nothing is asked for; ``params`` may be anything."""
    value = params.get(KV_QUALITY) if isinstance(params, dict) else None
    if value is not None and value != EXACT and not _is_quality(value):
        raise ValueError(f"{KV_QUALITY} is {short_repr(value)}: expected {EXACT!r}, or a number above 0, at most 1")


def _is_quality(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= 1.0


KV_CACHE = "kv_cache"
"""Name of what the answer says of the KV that was served."""


class ServedKV(TypedDict):
    """Tokens of a prompt that came from the cache, the least predicted quality of any node among them, and the tokens
    by the tier that they were found on."""

    exact_tokens: int
    lossy_tokens: int
    min_quality: float
    tiers: dict[str, int]


def served_kv(
    num_exact: int, num_lossy: int, min_quality: float = 1.0, tiers: Mapping[str, int] | None = None
) -> ServedKV:
    """So many tokens of a prompt came from the cache; ``tiers`` None: all of them from the GPU."""
    num_cached = num_exact + num_lossy
    found = {"gpu": num_cached} if tiers is None and num_cached else dict(tiers or {})
    quality = round(min_quality, 4)
    return {"exact_tokens": num_exact, "lossy_tokens": num_lossy, "min_quality": quality, "tiers": found}
