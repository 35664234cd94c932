"""Operations of a running cache on shadows and profiles."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from sglang_evicpress.core import Form
from sglang_evicpress.error_text import short_repr
from sglang_evicpress.introspect.arguments import (
    PAGE_PROFILES,
    IntrospectionError,
    Json,
    accept_only,
    flag,
    form,
    integer,
)
from sglang_evicpress.introspect.operation import (
    MAX_BODY_BYTES,
    MAX_CONTEXT_BYTES,
    MAX_PROFILE_BYTES,
    Access,
    Operation,
    Question,
)
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tiers.entry.identity import MAX_TOKEN

_KEY = re.compile(r"[0-9a-fA-F]{32}")


class InspectableShadows(Protocol):
    """Shadows, as a profiler uses them."""

    def open_shadow(self, tokens: Sequence[int], namespace: str | None, may_evict: bool) -> Json:
        """Copy a context's exact KV into a namespace of its own."""

    def make_shadow_form(self, space_id: int, form: Form) -> Json:
        """Compress a further copy of it."""

    def drop_shadow_form(self, space_id: int, form: Form) -> Json:
        """Free that copy."""

    def close_shadow(self, space_id: int, adopt: bool) -> Json:
        """Free all of it; ``adopt``: users' lossy nodes take the exact copy."""


class InspectableProfiles(Protocol):
    """Profiles, and the jobs that make them."""

    def list_profiles(self, after: bytes = b"", limit: int = PAGE_PROFILES) -> Json:
        """Up to ``limit`` profiles in short, and never more than PAGE_PROFILES, of contexts whose keys are above
        ``after``, in order of keys, and what unprofiled nodes are taken for. ``next``: ``after`` of the following
        page in hex, None at the end."""

    def show_profile(self, key: bytes) -> Json:
        """One profile with its curve."""

    def put_profile(self, profile: Profile, is_fresh: bool) -> Json:
        """Go by a profile from now on, merged with what was known unless ``is_fresh``; answers what holds now."""

    def next_profiling_job(self) -> Json:
        """Next job of a profiler: nothing, ``observe`` or ``profile``."""

    def note_observed(self, key: bytes, pairs: Sequence[tuple[float, float]]) -> Json:
        """Predicted and observed qualities of answers about a context; answers whether it has drifted."""

    def note_failed(self, key: bytes) -> Json:
        """A job came to nothing."""


@runtime_checkable
class Profiled(InspectableShadows, InspectableProfiles, Protocol):
    """Cache that can be profiled. Called between scheduler steps. Where it cannot be done now: ValueError or
    IntrospectionError, one sentence."""


def _of(cache: object) -> Profiled:
    if not isinstance(cache, Profiled):
        raise IntrospectionError(501, f"the cache is a {type(cache).__name__}, which cannot be profiled")
    return cache


def _tokens(arguments: Mapping[str, object]) -> array[int]:
    value = arguments.get("token_ids")
    if not isinstance(value, list) or not value:
        what = f"is {short_repr(value)}" if "token_ids" in arguments else "is missing"
        raise IntrospectionError(400, f"token_ids {what}: expected a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN:
            raise IntrospectionError(400, f"token_ids has {short_repr(token)}: expected whole numbers of at least 0")
    return array("q", value)


def _namespace(arguments: Mapping[str, object]) -> str | None:
    value = arguments.get("extra_key")
    if value is None or isinstance(value, str):
        return value
    raise IntrospectionError(400, f"extra_key is {short_repr(value)}: expected a string or null")


def _key(arguments: Mapping[str, object]) -> bytes:
    value = arguments.get("key")
    if isinstance(value, str) and _KEY.fullmatch(value):
        return bytes.fromhex(value)
    raise IntrospectionError(400, f"context {short_repr(value)} is no hash: expected 32 hex digits")


def _profile(arguments: Mapping[str, object]) -> Profile:
    try:
        return Profile.from_json(arguments.get("profile"))
    except ValueError as error:
        raise IntrospectionError(400, str(error)) from None


def _pairs(arguments: Mapping[str, object]) -> list[tuple[float, float]]:
    value = arguments.get("pairs")
    pairs = value if isinstance(value, list) else [value]
    read_pairs = []
    for pair in pairs:
        match pair:
            case [int() | float() as predicted, int() | float() as observed] if (
                0.0 <= predicted <= 1.0 and 0.0 <= observed <= 1.0
            ):
                read_pairs.append((float(predicted), float(observed)))
            case _:
                reason = f"pairs has {short_repr(pair)}: expected [predicted, observed], each from 0 to 1"
                raise IntrospectionError(400, reason)
    return read_pairs


def _open_shadow(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "token_ids", "extra_key", "may_evict")
    tokens, namespace, may_evict = _tokens(arguments), _namespace(arguments), flag(arguments, "may_evict")
    return lambda cache: _of(cache).open_shadow(tokens, namespace, may_evict)


def _make_shadow_form(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "shadow_id", "form")
    space_id, made = integer(arguments, "shadow_id", least=0), form(arguments)
    return lambda cache: _of(cache).make_shadow_form(space_id, made)


def _drop_shadow_form(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "shadow_id", "form")
    space_id, dropped = integer(arguments, "shadow_id", least=0), form(arguments)
    return lambda cache: _of(cache).drop_shadow_form(space_id, dropped)


def _close_shadow(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "shadow_id", "adopt")
    space_id, adopt = integer(arguments, "shadow_id", least=0), flag(arguments, "adopt")
    return lambda cache: _of(cache).close_shadow(space_id, adopt)


def _list_profiles(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "after", "limit")
    after = _key({"key": arguments["after"]}) if "after" in arguments else b""
    limit = integer({"limit": PAGE_PROFILES, **arguments}, "limit", least=1)
    return lambda cache: _of(cache).list_profiles(after, limit)


def _show_profile(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "key")
    key = _key(arguments)
    return lambda cache: _of(cache).show_profile(key)


def _put_profile(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "profile", "is_fresh")
    profile, is_fresh = _profile(arguments), flag(arguments, "is_fresh")
    return lambda cache: _of(cache).put_profile(profile, is_fresh)


def _profiling_job(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments)
    return lambda cache: _of(cache).next_profiling_job()


def _note_observed(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "key", "pairs")
    key, pairs = _key(arguments), _pairs(arguments)
    return lambda cache: _of(cache).note_observed(key, pairs)


def _note_failed(arguments: Mapping[str, object]) -> Question:
    accept_only(arguments, "key")
    key = _key(arguments)
    return lambda cache: _of(cache).note_failed(key)


def _operation(
    name: str,
    read: Callable[[Mapping[str, object]], Question],
    method: str = "POST",
    path: str = "",
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Operation:
    access = Access.READ if method == "GET" else Access.ACT
    return Operation(name, read, method, path, access, may_conflict=True, max_body_bytes=max_body_bytes)


PROFILE_OPERATIONS = (
    _operation("open_shadow", _open_shadow, "POST", "/evicpress/shadows", MAX_CONTEXT_BYTES),
    _operation("make_shadow_form", _make_shadow_form, "POST", "/evicpress/shadows/{shadow_id}/forms"),
    _operation("drop_shadow_form", _drop_shadow_form, "POST", "/evicpress/shadows/{shadow_id}/drop"),
    _operation("close_shadow", _close_shadow, "POST", "/evicpress/shadows/{shadow_id}/close"),
    _operation("profiles", _list_profiles, "GET", "/evicpress/profiles"),
    _operation("profile", _show_profile, "GET", "/evicpress/profiles/{key}"),
    _operation("put_profile", _put_profile, "POST", "/evicpress/profiles", MAX_PROFILE_BYTES),
    _operation("profiling_job", _profiling_job),
    _operation("note_observed", _note_observed),
    _operation("note_failed", _note_failed),
)
