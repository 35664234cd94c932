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

    def make_shadow_form(self, space_id: int, form: Form) -> Json:
        return {"asked": ("make_shadow_form", space_id, form)}

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


def test_what_may_be_left_out() -> None:
    assert asked("open_shadow", {"token_ids": [5]}) == ("open_shadow", array("q", [5]), None, False)
    assert asked("close_shadow", {"shadow_id": 1}) == ("close_shadow", 1, False)
    assert asked("put_profile", {"profile": PROFILE.to_json()}) == ("put_profile", PROFILE, False)
    assert asked("note_observed", {"key": KEY, "pairs": []}) == ("note_observed", bytes.fromhex(KEY), [])


@given(st.lists(st.integers(0, MAX_TOKEN), min_size=1))
def test_any_tokens_of_a_vocabulary_are_taken(tokens: list[int]) -> None:
    assert asked("open_shadow", {"token_ids": tokens}) == ("open_shadow", array("q", tokens), None, False)


@pytest.mark.parametrize(
    ("op", "arguments", "words"),
    [
        *((op, {**ARGUMENTS[op], "soon": 1}, ("'soon' is not known here", "accepted are")) for op in PROFILE_NAMES),
        ("open_shadow", {}, ("token_ids is missing", "a list of token ids")),
        ("open_shadow", {"token_ids": []}, ("token_ids is []",)),
        ("open_shadow", {"token_ids": "1,2"}, ("token_ids is '1,2'",)),
        ("open_shadow", {"token_ids": {"0": 1}}, ("token_ids is {",)),
        ("open_shadow", {"token_ids": [1, -1]}, ("token_ids has -1", "at least 0")),
        ("open_shadow", {"token_ids": [1, True]}, ("token_ids has True",)),
        ("open_shadow", {"token_ids": [1, 2.0]}, ("token_ids has 2.0",)),
        ("open_shadow", {"token_ids": [1, None]}, ("token_ids has None",)),
        ("open_shadow", {"token_ids": [MAX_TOKEN + 1]}, (f"token_ids has {MAX_TOKEN + 1}",)),
        ("open_shadow", {"token_ids": ["x" * 5000]}, ("token_ids has 'xxx",)),
        ("open_shadow", {"token_ids": [1], "extra_key": 3}, ("extra_key is 3", "a string or null")),
        ("make_shadow_form", {"form": "knorm@0.5"}, ("shadow_id is missing",)),
        ("make_shadow_form", {"shadow_id": 1}, ("form is missing",)),
        ("drop_shadow_form", {"shadow_id": 1, "form": "gone"}, ("'gone'",)),
        ("close_shadow", {}, ("shadow_id is missing",)),
        ("close_shadow", {"shadow_id": 1, "adopt": 1}, ("adopt is 1",)),
        ("profile", {}, ("context None is no hash", "32 hex digits")),
        ("profile", {"key": KEY[:-1]}, (KEY[:-1], "32 hex digits")),
        ("profile", {"key": " " * 32}, ("is no hash",)),
        ("profile", {"key": "ab " * 10 + "ab"}, ("is no hash",)),
        ("profile", {"key": 7}, ("context 7",)),
        ("put_profile", {}, ("profile is None",)),
        ("put_profile", {"profile": {**PROFILE.to_json(), "num_tokens": 100}}, ("num_tokens is 100", "blocks of 64")),
        ("put_profile", {"profile": PROFILE.to_json(), "is_fresh": 2}, ("is_fresh is 2",)),
        ("note_observed", {"key": KEY}, ("pairs has None", "[predicted, observed]")),
        ("note_observed", {"key": KEY, "pairs": [[0.5]]}, ("pairs has [0.5]",)),
        ("note_observed", {"key": KEY, "pairs": [[0.5, 1.5]]}, ("pairs has [0.5, 1.5]", "from 0 to 1")),
        ("note_observed", {"key": KEY, "pairs": [[-0.1, 1]]}, ("pairs has [-0.1, 1]",)),
        ("note_observed", {"key": KEY, "pairs": [[float("nan"), 1]]}, ("pairs has [nan, 1]",)),
        ("note_observed", {"key": KEY, "pairs": [["0.5", 1]]}, ("pairs has ['0.5', 1]",)),
        ("note_observed", {"key": KEY, "pairs": {"0.5": 1}}, ("pairs has {",)),
        ("note_failed", {"key": None}, ("context None",)),
    ],
)
def test_refusals_name_the_value_and_what_is_accepted(op: str, arguments: Json, words: tuple[str, ...]) -> None:
    with pytest.raises(IntrospectionError) as caught:
        read_question(op, arguments)
    reason = caught.value.reason
    assert caught.value.status == 400
    assert [word for word in words if word not in reason] == []
    assert "\n" not in reason and len(reason) < 500


@pytest.mark.parametrize("op", PROFILE_NAMES)
def test_what_cannot_be_done_now_is_409(op: str) -> None:
    class Full(FakeCache):
        def __getattribute__(self, name: str) -> object:
            found = super().__getattribute__(name)
            if not callable(found) or name.startswith("_"):
                return found

            def refuse(*_: object) -> Json:
                raise ValueError("no room for a shadow of 64 slots: shadows hold 0 and may hold 10")

            return refuse

    with pytest.raises(IntrospectionError, match="no room for a shadow of 64 slots") as caught:
        read_question(op, ARGUMENTS[op])(Full())  # type: ignore[arg-type]
    assert caught.value.status == 409
