"""Names of namespaces in the radix tree: extra keys of requests."""

from __future__ import annotations

SHADOW_PREFIX = "evicpress/shadow/"
SALT_PREFIX = "evicpress/salt/"


def is_shadow_name(extra_key: str | None) -> bool:
    """True if the namespace is that of a shadow, a copy to measure with."""
    return extra_key is not None and extra_key.startswith(SHADOW_PREFIX)


def salted_key(salt: str, extra_key: str) -> str:
    """Name of the namespace of a salt and a user's extra key; no two pairs have the same."""
    return f"{SALT_PREFIX}{len(salt)}/{salt}{extra_key}"


def salt_of(extra_key: str | None) -> str:
    """The salt in a name that ``salted_key`` made; empty in any other."""
    if extra_key is None or not extra_key.startswith(SALT_PREFIX):
        return ""
    length, _, rest = extra_key[len(SALT_PREFIX) :].partition("/")
    return rest[: int(length)] if length.isdecimal() else ""


def unsalted_key(extra_key: str | None) -> str | None:
    """The rest beside the salt in a name that ``salted_key`` made, None where nothing is; any other name as it is."""
    if extra_key is None or not extra_key.startswith(SALT_PREFIX):
        return extra_key
    length, _, rest = extra_key[len(SALT_PREFIX) :].partition("/")
    return (rest[int(length) :] or None) if length.isdecimal() else extra_key
