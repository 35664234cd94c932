"""Tenants: who they are, what quality they are held to and how much of each tier they may hold.

They are known by their cache salts. A file of them is a JSON object of names:
``{"acme": {"cache_salt": "s-1", "kv_quality": 0.95, "gpu_gb": 4}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_evicpress.asked_quality import KV_QUALITY, check_quality, least_quality
from sglang_evicpress.core import Tier
from sglang_evicpress.error_text import short_repr

CACHE_SALT = "cache_salt"
BYTES_PER_GB = 10**9
_MOST_GB = 1e9
LIMITS = {"gpu_gb": Tier.GPU, "host_gb": Tier.HOST, "ssd_gb": Tier.SSD}
_KEYS = f"{CACHE_SALT} and one or more of {', '.join((KV_QUALITY, *LIMITS))}"
_EXAMPLE = '{"acme": {"cache_salt": "s-1", "kv_quality": 0.95, "gpu_gb": 4}}'


@dataclass(frozen=True, slots=True)
class Tenant:
    """``cache_salt`` comes with its requests, ``least_quality`` is the mean quality that none of these falls below (0:
    any), ``limits`` the bytes that its nodes may hold on a tier; a tier that is not in it has no limit."""

    name: str
    cache_salt: str
    least_quality: float = 0.0
    limits: Mapping[Tier, int] = field(default_factory=dict)


def read_tenants(value: object) -> tuple[Tenant, ...]:
    """Tenants of a file's content. Raises ValueError, one sentence naming the tenant, the value and what is
    accepted."""
    if not isinstance(value, Mapping):
        raise ValueError(f"tenants is {_shown(value)}: expected an object of tenants, such as {_EXAMPLE}")
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
        raise ValueError(f"{where} is {_shown(fields)}: expected {_KEYS}, as in {_EXAMPLE}")
    unknown = [key for key in fields if key not in (CACHE_SALT, KV_QUALITY, *LIMITS)]
    if unknown:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r:.100}: expected {_KEYS}")
    salt = fields.get(CACHE_SALT)
    if not isinstance(salt, str) or not salt:  # a salt is a secret: its value is not shown
        raise ValueError(f"{where} has no {CACHE_SALT} that is a text: expected that of its requests, not empty")
    limits = {tier: _limit(where, key, fields[key]) for key, tier in LIMITS.items() if fields.get(key) is not None}
    if fields.get(KV_QUALITY) is None and not limits:
        raise ValueError(f"{where} has no {KV_QUALITY} and no limit: expected {_KEYS}")
    try:
        check_quality(fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Tenant(name, salt, least_quality(fields), limits)


def _shown(value: object) -> str:
    """A value, or its kind alone where it has texts: one may be a salt, which is a secret."""
    parts = value if isinstance(value, list) else [value]
    has_no_text = all(part is None or isinstance(part, int | float) for part in parts)
    return short_repr(value) if has_no_text else f"a {type(value).__name__}"


def _limit(where: str, key: str, value: object) -> int:
    """Bytes of a limit in GB (1e9 bytes)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_GB:
        return round(value * BYTES_PER_GB)
    raise ValueError(f"{where}: {key} is {short_repr(value)}: expected a number of GB (1e9 bytes) from 0 to 1e9")
