"""A profile comes back from JSON as it was, joins an earlier one, and is refused by name when it is impossible."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from hashlib import sha256

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, PRESSES, Form
from sglang_evicpress.quality.profile import BLOCK_TOKENS, Profile, context_keys, query_set
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.tiers.entry.identity import PathHash

KEYDIFF, KNORM = Form("keydiff", 0.5), Form("knorm", 0.4)
IDENTITY = b"an identity....."

forms = st.builds(Form, st.sampled_from(sorted(PRESSES)), st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
evidences = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(RunningStats.of)
profiles = st.builds(
    Profile,
    key=st.binary(min_size=16, max_size=16),
    num_tokens=st.integers(1, 2**18).map(lambda blocks: blocks * BLOCK_TOKENS),
    forms=st.dictionaries(forms, evidences, min_size=1, max_size=6),
    scorer=st.sampled_from(["logprob", "minilm", "rouge-l", "f1"]),
    query_set=st.binary(min_size=8, max_size=8).map(bytes.hex),
    num_queries=st.integers(1, 1000),
    measured_s=st.floats(0.0, 9e10),
)


def make_profile(**changes: object) -> Profile:
    profile = Profile(
        bytes(16),
        128,
        {KEYDIFF: RunningStats.of([0.5, 0.7]), KNORM: RunningStats.of([0.1])},
        "logprob",
        "0123456789abcdef",
        2,
        1.7e9,
    )
    return replace(profile, **changes)  # type: ignore[arg-type]


@given(profiles)
def test_profile_comes_back_from_json_as_it_was(profile: Profile) -> None:
    """Also fractions that differ in the seventh digit, or are next to 1."""
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert Profile.from_json(orjson.loads(orjson.dumps(profile.to_json()))) == profile


@given(profiles, profiles)
def test_joined_profile_comes_back_too(one: Profile, other: Profile) -> None:
    joined = one.merged(replace(other, scorer=one.scorer))
    assert Profile.from_json(joined.to_json()) == joined


def test_json_has_the_names_of_the_forms() -> None:
    assert make_profile().to_json() == {
        "key": "00" * 16,
        "num_tokens": 128,
        "forms": {"keydiff@0.5": [2.0, 0.6, pytest.approx(0.02)], "knorm@0.4": [1.0, 0.1, 0.0]},
        "scorer": "logprob",
        "query_set": "0123456789abcdef",
        "num_queries": 2,
        "measured_s": 1.7e9,
    }


def test_later_profile_takes_over_an_earlier_one_that_counts_for_no_more() -> None:
    earlier = make_profile(forms={KEYDIFF: RunningStats.of([0.0] * 50), KNORM: RunningStats.of([0.3])}, measured_s=1.0)
    later = make_profile(forms={KEYDIFF: RunningStats.of([1.0, 1.0])}, query_set="f" * 16, num_tokens=192)
    joined = later.merged(earlier)
    assert joined.forms[KEYDIFF].count == 4.0
    assert joined.forms[KEYDIFF].mean == pytest.approx(0.5)
    assert joined.forms[KNORM] == RunningStats.of([0.3])  # not measured again: holds on
    assert replace(joined, forms={}) == replace(later, forms={})
    assert later.forms == {KEYDIFF: RunningStats.of([1.0, 1.0])} and len(earlier.forms) == 2  # untouched


def test_nothing_is_taken_over_from_another_scorer_or_from_none() -> None:
    later = make_profile()
    assert later.merged(None) == later
    assert later.merged(make_profile(scorer="minilm", forms={KNORM: RunningStats.of([0.9])})) == later


def _without(name: str) -> dict[str, object]:
    obj = make_profile().to_json()
    del obj[name]
    return obj


@pytest.mark.parametrize(
    ("obj", "names"),
    [
        (None, ["None", "expected an object with key, num_tokens"]),
        ([], ["[]", "expected an object"]),
        ({}, ["has no key", "32 hex digits"]),
        ({1: 2, "key": 3}, ["key is 3", "32 hex digits"]),
        (_without("scorer"), ["has no scorer", "logprob"]),
        ({**make_profile().to_json(), "more": 1}, ["'more'", "expected key, num_tokens"]),
        ({"key": 7}, ["7", "32 hex digits"]),
        ({"key": "0" * 31}, ["0" * 31, "32 hex digits"]),
        ({"key": "A" * 32}, ["AAAA", "32 hex digits"]),
        ({"key": "0" * 32 + "\n"}, ["32 hex digits"]),
        ({"num_tokens": 100}, ["num_tokens is 100", "whole blocks of 64"]),
        ({"num_tokens": 0}, ["num_tokens is 0", "whole blocks"]),
        ({"num_tokens": 2**24 + 64}, ["num_tokens is 16777280", "at most 16777216"]),
        ({"num_tokens": 2**50}, ["num_tokens is 1125899906842624", "at most 16777216"]),
        ({"num_tokens": 64.0}, ["num_tokens is 64.0", "whole blocks"]),
        ({"num_tokens": True}, ["num_tokens is True", "whole blocks"]),
        ({"num_tokens": 2**60}, ["num_tokens", "whole blocks"]),
        ({"num_queries": 0}, ["num_queries is 0", "at least 1"]),
        ({"num_queries": "3"}, ["num_queries is '3'", "whole number"]),
        ({"scorer": ""}, ["scorer is ''", "logprob"]),
        ({"scorer": "Log Prob"}, ["'Log Prob'", "logprob"]),
        ({"scorer": None}, ["has no scorer", "logprob"]),
        ({"query_set": "abc"}, ["'abc'", "16 hex digits"]),
        ({"query_set": 3}, ["query_set is 3", "16 hex digits"]),
        ({"measured_s": -1}, ["-1", "Unix seconds"]),
        ({"measured_s": math.nan}, ["nan", "Unix seconds"]),
        ({"measured_s": 1e12}, ["1000000000000.0", "Unix seconds"]),
        ({"measured_s": "now"}, ["'now'", "Unix seconds"]),
        ({"forms": {}}, ["forms is {}", "at least one form"]),
        ({"forms": []}, ["forms is []", "at least one form"]),
        ({"forms": {"h2o@0.5": [1, 0.5, 0]}}, ["'h2o@0.5'", "keydiff"]),
        ({"forms": {"keydiff@2": [1, 0.5, 0]}}, ["'keydiff@2'", "0 < KEPT < 1"]),
        ({"forms": {"exact": [1, 1, 0]}}, ["'exact'", "lossy forms"]),
        ({"forms": {"keydiff@0.5": [1, 0.5, 0], "keydiff@0.50": [1, 0.6, 0]}}, ["'keydiff@0.50'", "once"]),
        ({"forms": {"keydiff@0.5": 0.5}}, ["0.5", "[count, mean, squares]"]),
        ({"forms": {"keydiff@0.5": "abc"}}, ["'abc'", "[count, mean, squares]"]),
        ({"forms": {"keydiff@0.5": [1, 0.5]}}, ["[1.0, 0.5]", "[count, mean, squares]"]),
        ({"forms": {"keydiff@0.5": [1, "0.5", 0]}}, ["'0.5'", "[count, mean, squares]"]),
        ({"forms": {"keydiff@0.5": [True, 0.5, 0]}}, ["True", "[count, mean, squares]"]),
        ({"forms": {"keydiff@0.5": [10**400, 0.5, 0]}}, ["keydiff@0.5", "[count, mean, squares]"]),
        ({"forms": {"keydiff@0.5": [0.5, 0.5, 0]}}, ["[0.5, 0.5, 0.0]", "at least 1 quality"]),
        ({"forms": {"keydiff@0.5": [1e300, 0.5, 0]}}, ["1e+300", "at least 1 quality"]),
        ({"forms": {"keydiff@0.5": [1, 1.1, 0]}}, ["1.1", "from 0 to 1"]),
        ({"forms": {"keydiff@0.5": [1, -0.1, 0]}}, ["-0.1", "from 0 to 1"]),
        ({"forms": {"keydiff@0.5": [2, 0.5, -1]}}, ["-1", "at least 0"]),
        ({"forms": {"keydiff@0.5": [4, 0.5, 1.1]}}, ["1.1", "quality from 0 to 1"]),
        ({"forms": {"keydiff@0.5": [2, math.nan, 0]}}, ["nan", "finite"]),
    ],
)
def test_bad_profiles_are_refused_by_name(obj: object, names: list[str]) -> None:
    if isinstance(obj, dict) and len(obj) == 1:
        obj = {**make_profile().to_json(), **obj}
    with pytest.raises(ValueError, match="^profile") as error:
        Profile.from_json(obj)
    for name in names:
        assert name in str(error.value)
    assert len(str(error.value)) < 600


def test_forms_with_a_codec_are_read_back_and_the_exact_one_is_refused() -> None:
    profile = make_profile(forms={Form("keydiff", 0.5, "int8"): RunningStats(1.0, 1.0)})
    assert Profile.from_json(profile.to_json()).forms == profile.forms
    for form in (EXACT, Form("keydiff", 0.5, "fp8")):
        with pytest.raises(ValueError, match="expected"):
            Profile.from_json(make_profile(forms={form: RunningStats(1.0, 1.0)}).to_json())


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.none() | st.text(max_size=3))
def test_context_keys_are_those_of_the_whole_blocks(tokens: list[int], namespace: str | None) -> None:
    keys = context_keys(IDENTITY, namespace, tokens)
    assert len(keys) == len(tokens) // BLOCK_TOKENS
    for index, key in enumerate(keys):
        path = PathHash(IDENTITY, namespace)
        path.update(tokens[: (index + 1) * BLOCK_TOKENS])
        assert key == path.key
    assert context_keys(IDENTITY, namespace, np.array(tokens, dtype=np.int64)) == keys


def test_context_keys_differ_by_model_namespace_and_every_token() -> None:
    tokens = list(range(128))
    changed = [*tokens[:100], 7, *tokens[101:]]
    keys = context_keys(IDENTITY, None, tokens)
    others = [
        context_keys(b"another identity", None, tokens),
        context_keys(IDENTITY, "", tokens),
        context_keys(IDENTITY, "tenant", tokens),
    ]
    assert len({key for each in (keys, *others) for key in each}) == 8
    assert context_keys(IDENTITY, None, changed)[0] == keys[0]
    assert context_keys(IDENTITY, None, changed)[1] != keys[1]


def test_query_set_is_told_by_its_queries_and_not_their_order() -> None:
    one, other = [1, 2, 3], [4, 5]
    assert query_set([one, other]) == query_set([np.array(other), tuple(one)])
    sets = [[one], [other], [one, other], [one, one], [one, one, other], [[1, 2], [3, 4, 5]], [], [[]]]
    assert len({query_set(each) for each in sets}) == len(sets)
    assert query_set([]) == sha256(b"").hexdigest()[:16]
