"""The margin on expected waits: it follows the late, and never closes a queue."""

from __future__ import annotations

import random

import pytest

from sglang_evicpress.policy.turns import LARGEST, LATE_SHARE, WaitMargin


@pytest.mark.parametrize(("waited_s", "margin_s"), [(2.0, 0.0), (9.0, 2.0 * LARGEST)])
def test_it_stays_at_none_while_nobody_is_late_and_is_bounded_where_everybody_is(
    waited_s: float, margin_s: float
) -> None:
    margin = WaitMargin(2.0)
    for _ in range(1000):
        margin.observe(waited_s)
    assert margin.seconds == pytest.approx(margin_s)


@pytest.mark.parametrize("spread_s", [0.1, 0.5])
def test_the_late_share_is_held(spread_s: float) -> None:
    """Requests are admitted while expectation and margin are within the limit; errors are normal."""
    rng, margin, late = random.Random(0), WaitMargin(2.0), 0
    for _ in range(5000):
        wait_s = 2.0 - margin.seconds + rng.gauss(0.0, spread_s)
        late += wait_s > 2.0
        margin.observe(wait_s)
    assert late / 5000 == pytest.approx(LATE_SHARE, abs=0.01)
