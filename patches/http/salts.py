"""One namespace for each pair of a cache salt and an extra key, and for no two pairs the same.

Up to SGLang 0.5.17 a request has one namespace in the tree: its salt and its extra key, one behind the other. So salt
"ab", extra key "ab", and salt "a" with extra key "b" would share KV. Later releases hand both on. Everywhere a salted
request gets an extra key that holds both and the length of the salt, and hands no salt on; an extra key of a user that
looks like such a name gets another. Touches ``OpenAIServingBase._compute_extra_key`` where salts are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang_evicpress.patches.tree.namespaces import SALT_PREFIX, salted_key

COMPUTE_KEY = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._compute_extra_key"


class SaltedName(str):
    """Name of a namespace that is ours, and no user's extra key."""

    __slots__ = ()


class Salted(Protocol):
    """A request to an OpenAI route."""

    cache_salt: str | list[str] | None
    extra_key: str | list[str] | None


class Keyed(Protocol):
    """SGLang's GenerateReqInput: a key and a salt, or one for each prompt."""

    extra_key: str | list[str] | None
    cache_salt: str | list[str] | None


def salted_name(salt: str, extra_key: str) -> SaltedName:
    """Name of the namespace; no two pairs have the same."""
    return SaltedName(salted_key(salt, extra_key))


def around_compute_extra_key(original: Callable[..., str | None], serving: object, request: Salted) -> str | None:
    """AROUND ``_compute_extra_key``, which raises for what is not a string."""
    key, salt = original(serving, request), getattr(request, "cache_salt", None)
    if not isinstance(salt, str) or not salt:
        return key
    extra_key = request.extra_key
    return salted_name(salt, extra_key if isinstance(extra_key, str) else "")


def keep_apart(asked: Keyed) -> None:
    """Put a request's salts into its extra keys, and give those that look like ours another name. What SGLang refuses
    is left as it is."""
    keys = getattr(asked, "extra_key", None)  # a request for an embedding may have neither
    names = _with_salts(getattr(asked, "cache_salt", None), keys)
    if names is not None:
        asked.extra_key, asked.cache_salt = names, None
    elif isinstance(keys, list):
        asked.extra_key = [_plain(key) for key in keys]
    elif keys is not None:
        asked.extra_key = _plain(keys)


def _with_salts(salts: str | list[str] | None, keys: str | list[str] | None) -> str | list[str] | None:
    """Names of the namespaces; None without a salt, and where these are no strings, or not as many as keys."""
    if isinstance(salts, str) and isinstance(keys, str | None):
        return _named(salts, keys) or None
    lengths = {len(each) for each in (salts, keys) if isinstance(each, list)}
    if salts is None or len(lengths) != 1:
        return None
    each_salt, each_key = (value if isinstance(value, list) else [value] * max(lengths) for value in (salts, keys))
    if not all(isinstance(each, str | None) for each in (*each_salt, *each_key)):
        return None
    return [_named(salt, key) for salt, key in zip(each_salt, each_key, strict=True)]


def _named(salt: str | None, key: str | None) -> str:
    return str(salted_name(salt, key or "")) if salt else _plain(key or "")


def _plain(key: str) -> str:
    if not isinstance(key, str):
        return key
    is_user_key = not isinstance(key, SaltedName)
    return str(salted_name("", key) if is_user_key and key.startswith(SALT_PREFIX) else key)
