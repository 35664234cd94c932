"""The quality that requests ask for."""

from __future__ import annotations

import pytest

from sglang_evicpress.quality.asked import asks_exact, check_quality


@pytest.mark.parametrize("params", [None, {}, {"kv_quality": None}, {"other": 1}, 5, "kv_quality", ["kv_quality"]])
def test_nothing_is_asked_for_without_the_field(params: object) -> None:
    check_quality(params)
    assert not asks_exact(params)


def test_exact_is_asked_for() -> None:
    check_quality({"kv_quality": "exact", "other": 1})
    assert asks_exact({"kv_quality": "exact", "other": 1})


@pytest.mark.parametrize("value", ["exakt", "Exact", "", 1, 0.97, True, ["exact"], {"exact": 1}, "x" * 10_000])
def test_what_is_not_known_is_named_with_what_is_accepted(value: object) -> None:
    with pytest.raises(ValueError, match="^kv_quality is .*: expected 'exact'$") as raised:
        check_quality({"kv_quality": value})
    assert len(str(raised.value)) < 200
    assert not asks_exact({"kv_quality": value})
