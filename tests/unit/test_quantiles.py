"""The one definition of a percentile, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from sglang_evicpress.quantiles import quantile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0], 0.25, 1.75),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0, 3.0, math.inf], 0.5, 2.5),
        ([1.0, 2.0, math.inf], 0.5, 2.0),
        ([1.0, 2.0, math.inf, math.inf], 0.5, math.inf),
        ([math.inf, math.inf], 0.9, math.inf),
    ],
)
def test_it_is_interpolated_and_infinite_where_the_upper_value_is(
    values: list[float], share: float, expected: float
) -> None:
    assert quantile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_one_of_nothing_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="expected one from 0 to 1 of at least one"):
        quantile(values, share)
