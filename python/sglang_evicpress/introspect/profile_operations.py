"""What can be asked of a running cache about shadows and profiles, besides what ``introspect`` lists."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

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
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tiers.entry.identity import MAX_TOKEN

_KEY = re.compile(r"[0-9a-fA-F]{32}")

PROFILE_OPS = (
    *("open_shadow", "make_shadow_form", "drop_shadow_form", "close_shadow"),
    *("profiles", "profile", "put_profile", "profiling_job", "note_observed", "note_failed"),
)


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
        """What a profiler should do now: nothing, ``observe`` or ``profile``."""

    def note_observed(self, key: bytes, pairs: Sequence[tuple[float, float]]) -> Json:
        """Predicted and observed qualities of answers about a context; answers whether it has drifted."""

    def note_failed(self, key: bytes) -> Json:
        """A job came to nothing."""


@runtime_checkable
class Profiled(InspectableShadows, InspectableProfiles, Protocol):
    """What a cache offers to a profiler. Called between scheduler steps. Where it cannot be done now: ValueError or
    IntrospectionError, one sentence."""


Question: TypeAlias = Callable[[Any], Json]


def read_profile_question(op: str, arguments: Mapping[str, object]) -> Question | None:
    """Check the arguments of one of ``PROFILE_OPS``; None for another operation. Raises IntrospectionError 400."""
    match op:
        case "open_shadow":
            accept_only(arguments, "token_ids", "extra_key", "may_evict")
            tokens, namespace, may_evict = _tokens(arguments), _namespace(arguments), flag(arguments, "may_evict")
            return lambda cache: _of(cache).open_shadow(tokens, namespace, may_evict)
        case "make_shadow_form":
            accept_only(arguments, "shadow_id", "form")
            space_id, made = integer(arguments, "shadow_id", least=0), form(arguments)
            return lambda cache: _of(cache).make_shadow_form(space_id, made)
        case "drop_shadow_form":
            accept_only(arguments, "shadow_id", "form")
            space_id, dropped = integer(arguments, "shadow_id", least=0), form(arguments)
            return lambda cache: _of(cache).drop_shadow_form(space_id, dropped)
        case "close_shadow":
            accept_only(arguments, "shadow_id", "adopt")
            space_id, adopt = integer(arguments, "shadow_id", least=0), flag(arguments, "adopt")
            return lambda cache: _of(cache).close_shadow(space_id, adopt)
        case "profiles":
            accept_only(arguments, "after", "limit")
            after = _key({"key": arguments["after"]}) if "after" in arguments else b""
            limit = integer({"limit": PAGE_PROFILES, **arguments}, "limit", least=1)
            return lambda cache: _of(cache).list_profiles(after, limit)
        case "profile":
            accept_only(arguments, "key")
            key = _key(arguments)
            return lambda cache: _of(cache).show_profile(key)
        case "put_profile":
            accept_only(arguments, "profile", "is_fresh")
            profile, is_fresh = _profile(arguments), flag(arguments, "is_fresh")
            return lambda cache: _of(cache).put_profile(profile, is_fresh)
        case "profiling_job":
            accept_only(arguments)
            return lambda cache: _of(cache).next_profiling_job()
        case "note_observed":
            accept_only(arguments, "key", "pairs")
            observed, pairs = _key(arguments), _pairs(arguments)
            return lambda cache: _of(cache).note_observed(observed, pairs)
        case "note_failed":
            accept_only(arguments, "key")
            failed = _key(arguments)
            return lambda cache: _of(cache).note_failed(failed)
    return None


def _of(cache: object) -> Profiled:
    if not isinstance(cache, Profiled):
        raise IntrospectionError(501, f"the cache is a {type(cache).__name__}, which cannot be profiled")
    return cache


def _tokens(arguments: Mapping[str, object]) -> array[int]:
    value = arguments.get("token_ids")
    if not isinstance(value, list) or not value:
        given = f"is {short_repr(value)}" if "token_ids" in arguments else "is missing"
        raise IntrospectionError(400, f"token_ids {given}: expected a list of token ids")
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
    found = []
    for pair in pairs:
        match pair:
            case [int() | float() as predicted, int() | float() as observed] if (
                0.0 <= predicted <= 1.0 and 0.0 <= observed <= 1.0
            ):
                found.append((float(predicted), float(observed)))
            case _:
                reason = f"pairs has {short_repr(pair)}: expected [predicted, observed], each from 0 to 1"
                raise IntrospectionError(400, reason)
    return found
