"""Cache salts apart from extra keys, on releases that concatenate them.

Up to SGLang 0.5.17 a request has one namespace in the tree: its salt and its extra key, one behind the other. So salt
"ab", extra key "ab", and salt "a" with extra key "b" would share KV. Here a salted request gets a name that holds both
lengths, and an extra key that looks like such a name gets another. Touches ``OpenAIServingBase._compute_extra_key``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SALT_PREFIX = "evicpress/salt/"
COMPUTE_KEY = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._compute_extra_key"


class SaltedName(str):
    """Name of a namespace that is ours, and no user's extra key."""

    __slots__ = ()


class Salted(Protocol):
    """A request to an OpenAI route."""

    cache_salt: str | list[str] | None
    extra_key: str | list[str] | None


class Keyed(Protocol):
    """SGLang's GenerateReqInput: a key, or one for each prompt."""

    extra_key: str | list[str] | None


def salted_name(salt: str, extra_key: str) -> SaltedName:
    """Name of the namespace; no two pairs have the same."""
    return SaltedName(f"{SALT_PREFIX}{len(salt)}/{salt}{extra_key}")


def around_compute_extra_key(original: Callable[..., str | None], serving: object, request: Salted) -> str | None:
    """AROUND ``_compute_extra_key``, which raises for what is not a string."""
    key, salt = original(serving, request), getattr(request, "cache_salt", None)
    if not isinstance(salt, str) or not salt:
        return key
    extra_key = request.extra_key
    return salted_name(salt, extra_key if isinstance(extra_key, str) else "")


def keep_apart(asked: Keyed) -> None:
    """Give a user's extra keys that look like ours another name."""
    keys = getattr(asked, "extra_key", None)  # a request for an embedding may have none
    if isinstance(keys, list):
        asked.extra_key = [_plain(key) for key in keys]
    elif keys is not None:
        asked.extra_key = _plain(keys)


def _plain(key: str) -> str:
    is_user_key = isinstance(key, str) and not isinstance(key, SaltedName)
    return str(salted_name("", key)) if is_user_key and key.startswith(SALT_PREFIX) else str(key)
