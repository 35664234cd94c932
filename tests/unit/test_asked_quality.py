"""The quality that requests ask for."""

from __future__ import annotations

import re

import pytest

from sglang_evicpress.asked_quality import Tenant, asks_exact, check_quality, least_quality, read_tenants


@pytest.mark.parametrize("params", [None, {}, {"kv_quality": None}, {"other": 1}, 5, "kv_quality", ["kv_quality"]])
def test_nothing_is_asked_for_without_the_field(params: object) -> None:
    check_quality(params)
    assert not asks_exact(params)


def test_exact_is_asked_for() -> None:
    check_quality({"kv_quality": "exact", "other": 1})
    assert asks_exact({"kv_quality": "exact", "other": 1})


@pytest.mark.parametrize(("value", "least"), [("exact", 1.0), (1, 1.0), (1.0, 1.0), (0.97, 0.97), (None, 0.0)])
def test_a_least_quality_is_asked_for(value: object, least: float) -> None:
    check_quality({"kv_quality": value})
    assert least_quality({"kv_quality": value}) == least
    assert asks_exact({"kv_quality": value}) == (least == 1.0)


@pytest.mark.parametrize(
    "value", ["exakt", "Exact", "", 0, -0.1, 1.01, float("nan"), True, ["exact"], {"exact": 1}, "x" * 10_000]
)
def test_what_is_not_known_is_named_with_what_is_accepted(value: object) -> None:
    with pytest.raises(
        ValueError, match="^kv_quality is .*: expected 'exact', or a number above 0, at most 1$"
    ) as raised:
        check_quality({"kv_quality": value})
    assert len(str(raised.value)) < 200
    assert not asks_exact({"kv_quality": value})


def test_tenants_are_read_by_name() -> None:
    given = {"acme": {"cache_salt": "a", "kv_quality": 0.9}, "law": {"cache_salt": "b", "kv_quality": "exact"}}
    assert read_tenants(given) == (Tenant("acme", "a", 0.9), Tenant("law", "b", 1.0))
    assert read_tenants({}) == ()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([1], "tenants is [1]: expected an object of tenants, such as"),
        ({"acme": 5}, "tenant 'acme' is 5: expected cache_salt and kv_quality"),
        ({"acme": {"salt": "a"}}, "tenant 'acme' has the unknown key 'salt': expected cache_salt and kv_quality"),
        ({"acme": {"cache_salt": "", "kv_quality": 0.9}}, "tenant 'acme' has no cache_salt that is a text"),
        ({"acme": {"cache_salt": "a"}}, "tenant 'acme' has no kv_quality: expected 'exact', or a number"),
        ({"acme": {"cache_salt": "a", "kv_quality": 2}}, "tenant 'acme': kv_quality is 2: expected 'exact', or a"),
        (
            {name: {"cache_salt": "a", "kv_quality": 0.9} for name in ("acme", "law")},
            "tenants 'acme' and 'law' have the same cache_salt: expected one for each",
        ),
    ],
)
def test_a_tenant_that_cannot_be_is_named(given: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        read_tenants(given)
