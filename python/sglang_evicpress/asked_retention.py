"""Retention that a request asks for: the field ``kv_retention_seconds`` of its custom parameters.

It is a weight and never a lock: what the request leaves in the cache counts as used once more within that time.
"""

from __future__ import annotations

from sglang_evicpress.error_text import short_repr

KV_RETENTION = "kv_retention_seconds"
MOST_S = 86_400.0


def retention_s(params: object) -> float:
    """Seconds that a request with these ``custom_params`` asks for; 0 where it asks for none."""
    value = params.get(KV_RETENTION) if isinstance(params, dict) else None
    return float(value) if isinstance(value, int | float) and _is_known(value) else 0.0


def check_retention(params: object) -> None:
    """Raises ValueError, one sentence naming the value and what is accepted. Without the field, or with None in it,
    nothing is asked for; ``params`` may be anything."""
    value = params.get(KV_RETENTION) if isinstance(params, dict) else None
    if value is not None and not _is_known(value):
        raise ValueError(f"{KV_RETENTION} is {short_repr(value)}: expected seconds above 0, at most {MOST_S:g}")


def _is_known(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= MOST_S
