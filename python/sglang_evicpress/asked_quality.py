"""Quality that is asked for: by requests, in the field ``kv_quality`` of their custom parameters, and for tenants.

Tenants are known by their cache salts. A file of them is a JSON object of names:
``{"acme": {"cache_salt": "s-1", "kv_quality": 0.95}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """Tokens of a prompt that came from the cache, and the least predicted quality of any node among them."""

    exact_tokens: int
    lossy_tokens: int
    min_quality: float


def served_kv(num_exact: int, num_lossy: int, min_quality: float = 1.0) -> ServedKV:
    """So many tokens of a prompt came from the cache."""
    return {"exact_tokens": num_exact, "lossy_tokens": num_lossy, "min_quality": round(min_quality, 4)}


CACHE_SALT = "cache_salt"
_EXAMPLE = '{"acme": {"cache_salt": "s-1", "kv_quality": 0.95}}'


@dataclass(frozen=True, slots=True)
class Tenant:
    """``cache_salt`` comes with its requests, ``least_quality`` is the mean quality that none of these falls below."""

    name: str
    cache_salt: str
    least_quality: float


def read_tenants(value: object) -> tuple[Tenant, ...]:
    """Tenants of a file's content. Raises ValueError, one sentence naming the tenant, the value and what is
    accepted."""
    if not isinstance(value, Mapping):
        raise ValueError(f"tenants is {short_repr(value)}: expected an object of tenants, such as {_EXAMPLE}")
    tenants = tuple(_tenant(str(name), fields) for name, fields in value.items())
    names: dict[str, str] = {}
    for tenant in tenants:
        other = names.setdefault(tenant.cache_salt, tenant.name)
        if other != tenant.name:
            raise ValueError(f"tenants {other!r} and {tenant.name!r} have the same {CACHE_SALT}: expected one for each")
    return tenants


def _tenant(name: str, fields: object) -> Tenant:
    where = f"tenant {name!r:.100}"
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where} is {short_repr(fields)}: expected {CACHE_SALT} and {KV_QUALITY}, as in {_EXAMPLE}")
    unknown = [key for key in fields if key not in (CACHE_SALT, KV_QUALITY)]
    if unknown:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r:.100}: expected {CACHE_SALT} and {KV_QUALITY}")
    salt = fields.get(CACHE_SALT)
    if not isinstance(salt, str) or not salt:  # a salt is a secret: its value is not shown
        raise ValueError(f"{where} has no {CACHE_SALT} that is a text: expected that of its requests, not empty")
    if fields.get(KV_QUALITY) is None:
        raise ValueError(f"{where} has no {KV_QUALITY}: expected 'exact', or a number above 0, at most 1")
    try:
        check_quality(fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Tenant(name, salt, least_quality(fields))
