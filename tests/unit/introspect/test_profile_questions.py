from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import Form
from sglang_evicpress.introspect.arguments import IntrospectionError, Json
from sglang_evicpress.introspect.operations import encode, read_object, read_question
from sglang_evicpress.introspect.profile_operations import PROFILE_OPERATIONS
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.tiers.entry.identity import MAX_TOKEN

KEY = "0123456789abcdef" * 2
PROFILE = Profile(
    bytes.fromhex(KEY), 128, {Form("knorm", 0.5): RunningStats(4.0, 0.75, 0.1)}, "logprob", "0" * 16, 4, 1e9
)
PROFILE_NAMES = [operation.name for operation in PROFILE_OPERATIONS]
ARGUMENTS: dict[str, Json] = {
    "open_shadow": {"token_ids": [1, 2, 3], "extra_key": "a", "may_evict": True},
    "make_shadow_form": {"shadow_id": "7", "form": "knorm@0.5"},
    "drop_shadow_form": {"shadow_id": 7, "form": "knorm@0.5"},
    "close_shadow": {"shadow_id": 7, "adopt": True},
    "profiles": {},
    "profile": {"key": KEY},
    "put_profile": {"profile": PROFILE.to_json(), "is_fresh": True},
    "profiling_job": {},
    "note_observed": {"key": KEY, "pairs": [[0.9, 0.5], [1, 0]]},
    "note_failed": {"key": KEY},
}


class FakeCache:
    """Answers what it was asked."""

    def open_shadow(self, tokens: Sequence[int], namespace: str | None, may_evict: bool) -> Json:
        return {"asked": ("open_shadow", tokens, namespace, may_evict)}

    def make_shadow_form(self, space_id: int, form: Form, layer_tokens: Sequence[int] = ()) -> Json:
        return {"asked": ("make_shadow_form", space_id, form, *layer_tokens)}

    def drop_shadow_form(self, space_id: int, form: Form) -> Json:
        return {"asked": ("drop_shadow_form", space_id, form)}

    def close_shadow(self, space_id: int, adopt: bool) -> Json:
        return {"asked": ("close_shadow", space_id, adopt)}

    def list_profiles(self, after: bytes = b"", limit: int = 200) -> Json:
        return {"asked": ("profiles",)}

    def show_profile(self, key: bytes) -> Json:
        return {"asked": ("profile", key)}

    def put_profile(self, profile: Profile, is_fresh: bool) -> Json:
        return {"asked": ("put_profile", profile, is_fresh)}

    def next_profiling_job(self) -> Json:
        return {"asked": ("profiling_job",)}

    def note_observed(self, key: bytes, pairs: Sequence[tuple[float, float]]) -> Json:
        return {"asked": ("note_observed", key, pairs)}

    def note_failed(self, key: bytes) -> Json:
        return {"asked": ("note_failed", key)}


def asked(op: str, arguments: Json) -> object:
    return read_question(op, arguments)(FakeCache())["asked"]


def test_every_operation_reaches_the_cache_with_what_was_given() -> None:
    key, form = bytes.fromhex(KEY), Form("knorm", 0.5)
    assert set(ARGUMENTS) == set(PROFILE_NAMES)
    assert {op: asked(op, read_object(encode(arguments))) for op, arguments in ARGUMENTS.items()} == {
        "open_shadow": ("open_shadow", array("q", [1, 2, 3]), "a", True),
        "make_shadow_form": ("make_shadow_form", 7, form),
        "drop_shadow_form": ("drop_shadow_form", 7, form),
        "close_shadow": ("close_shadow", 7, True),
        "profiles": ("profiles",),
        "profile": ("profile", key),
        "put_profile": ("put_profile", PROFILE, True),
        "profiling_job": ("profiling_job",),
        "note_observed": ("note_observed", key, [(0.9, 0.5), (1.0, 0.0)]),
        "note_failed": ("note_failed", key),
    }


def test_a_form_may_say_what_each_layer_keeps() -> None:
    words: Json = {"shadow_id": 7, "form": "knorm@0.5"}
    form = Form("knorm", 0.5)
    assert asked("make_shadow_form", words | {"layer_tokens": [9, 40]}) == ("make_shadow_form", 7, form, 9, 40)
    for wrong in ([], [0], [True], "9", [1.5], [1] * 1025):
        with pytest.raises(IntrospectionError, match="layer_tokens .* expected"):
            asked("make_shadow_form", words | {"layer_tokens": wrong})


def test_what_may_be_left_out() -> None:
    assert asked("open_shadow", {"token_ids": [5]}) == ("open_shadow", array("q", [5]), None, False)
    assert asked("close_shadow", {"shadow_id": 1}) == ("close_shadow", 1, False)
    assert asked("put_profile", {"profile": PROFILE.to_json()}) == ("put_profile", PROFILE, False)
    assert asked("note_observed", {"key": KEY, "pairs": []}) == ("note_observed", bytes.fromhex(KEY), [])


@given(st.lists(st.integers(0, MAX_TOKEN), min_size=1))
def test_any_tokens_of_a_vocabulary_are_taken(tokens: list[int]) -> None:
    assert asked("open_shadow", {"token_ids": tokens}) == ("open_shadow", array("q", tokens), None, False)
