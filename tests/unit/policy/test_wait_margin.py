"""The margin on expected waits: it follows the late, and never closes a queue."""

from __future__ import annotations

import random

import pytest

from sglang_evicpress.policy.wait_margin import LARGEST, LATE_SHARE, WaitMargin


def test_it_starts_at_none_and_stays_there_while_nobody_is_late() -> None:
    margin = WaitMargin(2.0)
    for _ in range(1000):
        margin.observe(2.0)
    assert margin.seconds == 0.0


def test_it_is_bounded_where_everybody_is_late() -> None:
    margin = WaitMargin(2.0)
    for _ in range(1000):
        margin.observe(9.0)
    assert margin.seconds == pytest.approx(2.0 * LARGEST)


@pytest.mark.parametrize("spread_s", [0.1, 0.5])
def test_the_late_share_is_held(spread_s: float) -> None:
    """Requests are admitted while expectation and margin are within the limit; errors are normal."""
    rng, margin, late = random.Random(0), WaitMargin(2.0), 0
    for _ in range(5000):
        wait_s = 2.0 - margin.seconds + rng.gauss(0.0, spread_s)
        late += wait_s > 2.0
        margin.observe(wait_s)
    assert late / 5000 == pytest.approx(LATE_SHARE, abs=0.01)
