from __future__ import annotations

import pytest

from sglang_evicpress.policy.utility import utility


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
