from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.utility import PrefillCost, recompute_seconds, utility

sizes = st.integers(0, 100_000)


@pytest.mark.parametrize(
    ("weight", "alpha", "quality", "delay_s", "expected"),
    [
        (1.0, 1.0, 1.0, 0.0, 1.0),
        (1.0, 1.0, 1.0, 0.2, 0.8),
        (3.0, 2.0, 0.9, 0.0, 5.4),
        (3.0, 2.0, 0.9, 0.3, 4.5),
        (2.0, 0.5, 1.0, 1.5, -2.0),  # waiting outweighs the quality
        (0.0, 5.0, 0.9, 2.0, 0.0),  # never used again
    ],
)
def test_utility_by_hand(weight: float, alpha: float, quality: float, delay_s: float, expected: float) -> None:
    assert utility(weight, alpha, quality, delay_s) == pytest.approx(expected)


def test_alpha_turns_the_papers_example_where_the_two_differ_as_much_in_quality_as_in_seconds() -> None:
    # EvicPress section 4.2, 2wikimQA: quality 0.82 at 0.20 s or 0.92 at 0.24 s. The two meet at alpha 0.4
    # (the paper says "above 0.3"; 0.04 s / 0.10 is 0.4).
    assert utility(1.0, 0.39, 0.82, 0.20) > utility(1.0, 0.39, 0.92, 0.24)
    assert utility(1.0, 0.41, 0.82, 0.20) < utility(1.0, 0.41, 0.92, 0.24)


@pytest.mark.parametrize(
    ("num_tokens", "depth_tokens", "expected"),
    [
        (0, 0, 0.01),
        (100, 0, 0.01 + 0.1 + 100 * 50 * 1e-6),
        (100, 900, 0.01 + 0.1 + 100 * 950 * 1e-6),
        (1, 0, 0.01 + 0.001 + 0.5e-6),
    ],
)
def test_recompute_seconds_by_hand(num_tokens: int, depth_tokens: int, expected: float) -> None:
    assert recompute_seconds(num_tokens, depth_tokens, PrefillCost(0.01, 1e-3, 1e-6)) == pytest.approx(expected)


@given(sizes, sizes, sizes)
def test_recomputing_a_path_in_two_parts_costs_one_more_fixed_share(first: int, second: int, depth: int) -> None:
    model = PrefillCost(0.01, 1e-4, 1e-8)
    parts = recompute_seconds(first, depth, model) + recompute_seconds(second, depth + first, model)
    assert parts == pytest.approx(recompute_seconds(first + second, depth, model) + model.fixed_s)


@pytest.mark.parametrize("name", ["fixed_s", "per_token_s", "per_token_depth_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_a_bad_prefill_cost_is_refused_by_name(name: str, value: float) -> None:
    good = {"fixed_s": 0.01, "per_token_s": 1e-4, "per_token_depth_s": 1e-8}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        PrefillCost(**(good | {name: value}))
