"""Salts and extra keys never share a namespace: where SGLang concatenates them, and where it hands both on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.http import salts
from sglang_evicpress.patches.tree.namespaces import is_shadow_name

HAS_SALTS = "cache_salt" in RELEASE.KEY_FIELDS
pytestmark = pytest.mark.sglang
concatenates = pytest.mark.skipif(HAS_SALTS, reason="requests of this SGLang hold the salt")
hands_on = pytest.mark.skipif(not HAS_SALTS, reason="this SGLang makes one key of both")

Namespace = Callable[[str | None, str | None], str | None]
TEXTS = st.text("a1/", max_size=3)
KEYS = st.one_of(st.none(), TEXTS, TEXTS.map(lambda end: salts.SALT_PREFIX + end))


def concatenated(salt: str | None, extra_key: str | None) -> str | None:
    """Name with which the tree sees a request of an OpenAI route that makes one key of both."""
    request = SimpleNamespace(cache_salt=salt, extra_key=extra_key)
    compute = OpenAIServingBase._compute_extra_key
    asked = SimpleNamespace(extra_key=salts.around_compute_extra_key(compute, None, request))
    salts.keep_apart(asked)
    assert asked.extra_key is None or type(asked.extra_key) is str
    return asked.extra_key


def handed_on(salt: str | None, extra_key: str | None) -> str | None:
    """Name with which the tree sees a request that has both."""
    asked = SimpleNamespace(cache_salt=salt, extra_key=extra_key)
    salts.keep_apart(asked)
    assert not asked.cache_salt and (asked.extra_key is None or type(asked.extra_key) is str)
    return asked.extra_key or None


namespaces = pytest.mark.parametrize(
    "namespace", [pytest.param(concatenated, marks=concatenates), pytest.param(handed_on, marks=hands_on)]
)


@namespaces
def test_equal_concatenations_are_apart(namespace: Namespace) -> None:
    pairs = [(None, "ab"), ("ab", None), ("a", "b"), ("", "ba"), ("b", "a"), (None, None), (None, "1/ab"), ("1/", "ab")]
    names = [namespace(*pair) for pair in pairs]
    assert len(set(names)) == len(names)


@namespaces
@given(
    pairs=st.lists(
        st.tuples(KEYS, KEYS), min_size=2, max_size=8, unique_by=lambda pair: tuple(each or None for each in pair)
    )
)
def test_no_two_pairs_share_a_name(namespace: Namespace, pairs: list[tuple[str | None, str | None]]) -> None:
    names = [namespace(*pair) for pair in pairs]
    assert all(one != other for one, other in combinations(names, 2))


@namespaces
def test_without_a_salt_the_name_is_the_extra_key(namespace: Namespace) -> None:
    assert namespace(None, "tenant") == "tenant" and namespace("", "tenant") == "tenant"


def test_each_of_several_keys_is_kept_apart() -> None:
    asked = SimpleNamespace(extra_key=["a", salts.salted_name("s", ""), str(salts.salted_name("s", ""))])
    salts.keep_apart(asked)
    assert len(set(asked.extra_key)) == 3 and asked.extra_key[0] == "a"


@namespaces
def test_a_salt_makes_no_shadow(namespace: Namespace) -> None:
    assert not is_shadow_name(namespace("evicpress/shadow/", "x"))


@concatenates
def test_a_salt_that_sglang_cannot_concatenate_is_refused() -> None:
    with pytest.raises(TypeError, match="cache_salt must be a string"):
        concatenated(["a"], None)  # type: ignore[arg-type]


ONE_SALT_EACH = {
    "one for all": ("s", None, [("s", ""), ("s", "")]),
    "one each": (["s", "t"], None, [("s", ""), ("t", "")]),
    "one salt, a key each": ("s", ["a", "b"], [("s", "a"), ("s", "b")]),
    "a salt each, one key": (["s", "t"], "a", [("s", "a"), ("t", "a")]),
    "both": (["s", "t"], ["a", "b"], [("s", "a"), ("t", "b")]),
    "one without": (["s", ""], ["a", "b"], [("s", "a"), ("", "b")]),
}


@hands_on
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize(("salt", "extra_key", "pairs"), ONE_SALT_EACH.values(), ids=ONE_SALT_EACH)
def test_each_prompt_of_a_batch_has_the_name_of_its_pair(
    salt: str | list[str], extra_key: str | list[str] | None, pairs: list[tuple[str, str]], num_samples: int
) -> None:
    asked = GenerateReqInput(text=["x", "y"], cache_salt=salt, extra_key=extra_key, sampling_params={"n": num_samples})
    salts.keep_apart(asked)
    asked.normalize_batch_and_arguments()
    parts = [asked[index] for index in range(2 * num_samples)]
    assert [part.extra_key for part in parts] == [handed_on(*pair) for pair in pairs] * num_samples
    assert {part.cache_salt for part in parts} == {None}


WRONG = {
    "too few": (["x", "y"], ["s"], None),
    "as many as no keys": (["x", "y"], ["s", "t"], ["a"]),
    "a number": ("x", 5, None),
    "numbers": (["x", "y"], [5, 6], None),
    "a list for one": ("x", ["s"], None),
    "none at all": (["x", "y"], [], None),
    "with a number as key": ("x", "s", 5),
}


@hands_on
@pytest.mark.parametrize(("text", "salt", "extra_key"), WRONG.values(), ids=WRONG)
def test_what_sglang_refuses_is_refused(text: str | list[str], salt: object, extra_key: object) -> None:
    """None of them may reach the tree with a salt of its own."""
    asked = GenerateReqInput(text=text, cache_salt=salt, extra_key=extra_key)  # type: ignore[arg-type]
    salts.keep_apart(asked)
    with pytest.raises(ValueError, match="extra_key|cache_salt"):
        asked.normalize_batch_and_arguments()
