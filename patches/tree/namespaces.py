"""Names of namespaces in the radix tree: extra keys of requests."""

from __future__ import annotations

SHADOW_PREFIX = "evicpress/shadow/"


def is_shadow_name(extra_key: str | None) -> bool:
    """True if the namespace is that of a shadow, a copy to measure with."""
    return extra_key is not None and extra_key.startswith(SHADOW_PREFIX)
