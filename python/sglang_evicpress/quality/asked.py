"""Quality that a request asks for: the field ``kv_quality`` of its custom parameters."""

from __future__ import annotations

from sglang_evicpress.error_text import short_repr

KV_QUALITY = "kv_quality"
EXACT = "exact"


def asks_exact(params: object) -> bool:
    """True if a request with these ``custom_params`` is served from exact KV only."""
    return isinstance(params, dict) and params.get(KV_QUALITY) == EXACT


def check_quality(params: object) -> None:
    """Raises ValueError, one sentence naming the value and what is accepted, for a quality that is not known. Without
    the field, or with None in it, nothing is asked for; ``params`` may be anything."""
    value = params.get(KV_QUALITY) if isinstance(params, dict) else None
    if value is not None and value != EXACT:
        raise ValueError(f"{KV_QUALITY} is {short_repr(value)}: expected {EXACT!r}")


KV_CACHE = "kv_cache"
"""Name of what the answer says of the KV that was served."""

ServedKV = dict[str, int]


def served_kv(num_exact: int, num_lossy: int) -> ServedKV:
    """So many tokens of a prompt came from the cache."""
    return {"exact_tokens": num_exact, "lossy_tokens": num_lossy}
