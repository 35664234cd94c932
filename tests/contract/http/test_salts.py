"""Salts and extra keys never share a namespace, on releases that concatenate them."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.http import salts
from sglang_evicpress.patches.tree.namespaces import is_shadow_name

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif("cache_salt" in RELEASE.KEY_FIELDS, reason="keys of this SGLang hold the salt"),
]

KEYS = st.one_of(
    st.none(), st.text("a1/", max_size=3), st.text("a1/", max_size=3).map(lambda end: salts.SALT_PREFIX + end)
)


def namespace(salt: str | None, extra_key: str | None) -> str | None:
    """Name with which the tree sees a request of an OpenAI route."""
    request = SimpleNamespace(cache_salt=salt, extra_key=extra_key)
    compute = OpenAIServingBase._compute_extra_key
    asked = SimpleNamespace(extra_key=salts.around_compute_extra_key(compute, None, request))
    salts.keep_apart(asked)
    assert asked.extra_key is None or type(asked.extra_key) is str
    return asked.extra_key


def test_equal_concatenations_are_apart() -> None:
    pairs = [(None, "ab"), ("ab", None), ("a", "b"), ("", "ba"), ("b", "a"), (None, None), (None, "1/ab"), ("1/", "ab")]
    names = [namespace(*pair) for pair in pairs]
    assert len(set(names)) == len(names)


@given(
    st.lists(st.tuples(KEYS, KEYS), min_size=2, max_size=8, unique_by=lambda pair: tuple(each or None for each in pair))
)
def test_no_two_pairs_share_a_name(pairs: list[tuple[str | None, str | None]]) -> None:
    names = [namespace(*pair) for pair in pairs]
    assert all(one != other for one, other in combinations(names, 2))


def test_without_a_salt_the_name_is_the_extra_key() -> None:
    assert namespace(None, "tenant") == "tenant" and namespace("", "tenant") == "tenant"


def test_each_of_several_keys_is_kept_apart() -> None:
    asked = SimpleNamespace(extra_key=["a", salts.salted_name("s", ""), str(salts.salted_name("s", ""))])
    salts.keep_apart(asked)
    assert len(set(asked.extra_key)) == 3 and asked.extra_key[0] == "a"


def test_a_salt_makes_no_shadow() -> None:
    assert not is_shadow_name(namespace("evicpress/shadow/", "x"))


def test_what_sglang_refuses_is_refused() -> None:
    with pytest.raises(TypeError, match="cache_salt must be a string"):
        namespace(["a"], None)  # type: ignore[arg-type]
