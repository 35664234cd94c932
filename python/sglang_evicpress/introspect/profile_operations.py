"""Operations of a running cache on shadows and profiles."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from sglang_evicpress.core import Form
from sglang_evicpress.error_text import short_repr
from sglang_evicpress.introspect import schemas
from sglang_evicpress.introspect.arguments import (
    FIRST_ITEMS,
    PAGE_PROFILES,
    IntrospectionError,
    Json,
    flag,
    integer,
    refused,
    stored_form,
)
from sglang_evicpress.introspect.operation import (
    MAX_BODY_BYTES,
    MAX_CONTEXT_BYTES,
    MAX_PROFILE_BYTES,
    Access,
    Argument,
    Arguments,
    Operation,
    Question,
    asks,
)
from sglang_evicpress.introspect.parameters import CURSOR, limit
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.tiers.entry.identity import MAX_TOKEN

MAX_LAYERS = 1024  # of any model
_HEX = re.compile(r"[0-9a-fA-F]{32}")


class InspectableShadows(Protocol):
    """Shadows, as a profiler uses them. Where it cannot be done now: ValueError or IntrospectionError, one sentence."""

    def open_shadow(self, tokens: Sequence[int], namespace: str | None, may_evict: bool) -> Json:
        """Copy a context's exact KV into a namespace of its own."""

    def make_shadow_form(self, space_id: int, form: Form, layer_tokens: Sequence[int] = ()) -> Json:
        """Compress a further copy of it, to ``layer_tokens`` in its layers where they are given, whatever ``form`` says
        of them."""

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


def _tokens(arguments: Arguments, name: str) -> array[int]:
    value = arguments.get(name)
    if not isinstance(value, list) or not value:
        raise refused(arguments, name, "a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN:
            raise IntrospectionError(400, f"{name} has {short_repr(token)}: expected whole numbers of at least 0")
    return array("q", value)


def _layer_tokens(arguments: Arguments, name: str) -> tuple[int, ...]:
    value = arguments.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LAYERS:
        raise refused(arguments, name, f"a list of 1 to {MAX_LAYERS} numbers of tokens, the lowest layer first")
    for tokens in value:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_TOKEN:
            raise IntrospectionError(400, f"{name} has {short_repr(tokens)}: expected whole numbers of at least 1")
    return tuple(value)


def _namespace(arguments: Arguments, name: str) -> str | None:
    value = arguments.get(name)
    if value is None or isinstance(value, str):
        return value
    raise refused(arguments, name, "a string or null")


def _key(arguments: Arguments, name: str) -> bytes:
    value = arguments.get(name)
    if isinstance(value, str) and _HEX.fullmatch(value):
        return bytes.fromhex(value)
    raise refused(arguments, name, "the hash of a context, 32 hex digits")


def _profile(arguments: Arguments, name: str) -> Profile:
    try:
        return Profile.from_json(arguments.get(name))
    except ValueError as error:
        raise IntrospectionError(400, str(error)) from None


def _pairs(arguments: Arguments, name: str) -> list[tuple[float, float]]:
    value = arguments.get(name)
    pairs = []
    for pair in value if isinstance(value, list) else [value]:
        match pair:
            case [int() | float() as predicted, int() | float() as observed] if (
                0.0 <= predicted <= 1.0 and 0.0 <= observed <= 1.0
            ):
                pairs.append((float(predicted), float(observed)))
            case _:
                reason = f"{name} has {short_repr(pair)}: expected [predicted, observed], each from 0 to 1"
                raise IntrospectionError(400, reason)
    return pairs


def _operation(
    name: str,
    read: Callable[[Arguments], Question],
    method: str = "POST",
    path: str = "",
    text: str = "",
    answer: Json | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Operation:
    access = Access.READ if method == "GET" else Access.ACT
    return Operation(
        *(name, read, method, path, access),
        may_conflict=True,
        max_body_bytes=max_body_bytes,
        text=text,
        answer=schemas.OBJECT if answer is None else answer,
        more_statuses=(507,) if name == "put_profile" else (),
    )


_HASH: Json = {"type": "string", "pattern": "^[0-9a-fA-F]{32}$"}
_SHADOW = Argument("shadow_id", partial(integer, least=0), {"type": "integer", "minimum": 0}, "id of a shadow", True)
_STORED_FORM = Argument("form", stored_form, {"type": "string"}, "form such as keydiff@0.5+int4", True)
_LAYER_TOKENS = Argument(
    "layer_tokens",
    _layer_tokens,
    {"type": "array", "items": {"type": "integer", "minimum": 1}},
    "tokens that each layer keeps, the lowest first, whatever the form says of layers",
)
_KEY = Argument("key", _key, _HASH, "hash of a context", True)

PROFILE_OPERATIONS = (
    _operation(
        "open_shadow",
        asks(
            InspectableShadows.open_shadow,
            Argument("token_ids", _tokens, {"type": "array", "items": {"type": "integer", "minimum": 0}}, "ids", True),
            Argument("extra_key", _namespace, {"type": ["string", "null"]}, "namespace of the context"),
            Argument("may_evict", flag, {"type": "boolean", "default": False}, "makes room by evicting"),
        ),
        *("POST", "/evicpress/shadows", "Copy a context's exact KV, for evicpress profile", None, MAX_CONTEXT_BYTES),
    ),
    _operation(
        "make_shadow_form",
        asks(InspectableShadows.make_shadow_form, _SHADOW, _STORED_FORM, named=(_LAYER_TOKENS,)),
        *("POST", "/evicpress/shadows/{shadow_id}/forms", "Compress a further copy of it"),
    ),
    _operation(
        "drop_shadow_form",
        asks(InspectableShadows.drop_shadow_form, _SHADOW, _STORED_FORM),
        *("POST", "/evicpress/shadows/{shadow_id}/drop", "Free that copy"),
    ),
    _operation(
        "close_shadow",
        asks(
            InspectableShadows.close_shadow,
            _SHADOW,
            Argument("adopt", flag, {"type": "boolean", "default": False}, "users' lossy nodes take the exact copy"),
        ),
        *("POST", "/evicpress/shadows/{shadow_id}/close", "Free all of it"),
    ),
    _operation(
        "profiles",
        asks(
            InspectableProfiles.list_profiles,
            named=(
                Argument("after", _key, _HASH, "only contexts whose hashes are above it", other_name=CURSOR),
                limit("profiles", FIRST_ITEMS["profiles"]),
            ),
        ),
        *("GET", "/evicpress/profiles"),
        "Contexts measured, what the others are taken for, what online profiling did",
        schemas.PROFILES,
    ),
    _operation(
        "profile",
        asks(InspectableProfiles.show_profile, _KEY),
        *("GET", "/evicpress/profiles/{key}"),
        "One context: count, mean and spread of every form, and what is expected of it",
        schemas.PROFILE,
    ),
    _operation(
        "put_profile",
        asks(
            InspectableProfiles.put_profile,
            Argument("profile", _profile, {"type": "object"}, "profile, as evicpress profile writes it", True),
            Argument("is_fresh", flag, {"type": "boolean", "default": False}, "replaces what was known"),
        ),
        *("POST", "/evicpress/profiles", "Go by a profile from now on", None, MAX_PROFILE_BYTES),
    ),
    _operation("profiling_job", asks(InspectableProfiles.next_profiling_job)),
    _operation(
        "note_observed",
        asks(InspectableProfiles.note_observed, _KEY, Argument("pairs", _pairs, {"type": "array"}, "qualities")),
    ),
    _operation("note_failed", asks(InspectableProfiles.note_failed, _KEY)),
)
