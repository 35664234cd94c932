"""The arithmetic of the wear budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.tiers.ssd.tier import SsdTier
from sglang_evicpress.tiers.ssd.wear import BURST_S, DAY_S, WearBudget

PER_DAY = 24_000.0  # a thousand an hour


def test_without_a_limit_everything_is_allowed_and_counted() -> None:
    budget = WearBudget(None, 0.0)
    budget.take(10**15)
    assert budget.allows(0.0) and budget.allows(1.0)
    assert budget.describe(DAY_S) == {
        "limit_bytes_per_day": None,
        "written_bytes": 10**15,
        "refused_bytes": 0,
        "bytes_per_day_so_far": 10**15,
        "left_bytes": None,
    }


def test_a_full_bucket_holds_an_hour_and_one_write_may_overdraw_it() -> None:
    budget = WearBudget(PER_DAY, 100.0)
    assert budget.describe(100.0)["left_bytes"] == 1000.0
    budget.take(999)
    assert budget.allows(100.0)
    budget.take(2001)
    assert not budget.allows(100.0)
    assert not budget.allows(100.0 + 2 * BURST_S)  # 2000 of the debt are paid
    assert budget.allows(100.0 + 2 * BURST_S + 1.0)


def test_an_empty_bucket_allows_nothing() -> None:
    budget = WearBudget(PER_DAY, 0.0)
    budget.take(1000)
    assert not budget.allows(0.0)


def test_quiet_days_pay_for_no_more_than_an_hour() -> None:
    budget = WearBudget(PER_DAY, 0.0)
    assert budget.allows(30 * DAY_S)
    assert budget.describe(30 * DAY_S)["left_bytes"] == 1000.0


def test_the_gauge_shows_what_was_written_and_refused() -> None:
    budget = WearBudget(PER_DAY, 50.0)
    budget.take(600)
    budget.refuse(70)
    budget.refuse(7)
    shown = budget.describe(50.0 + BURST_S)
    assert (shown["written_bytes"], shown["refused_bytes"], shown["limit_bytes_per_day"]) == (600, 77, PER_DAY)
    assert shown["bytes_per_day_so_far"] == pytest.approx(24 * 600)


@given(
    st.floats(1.0, 1e15),
    st.lists(st.tuples(st.floats(0.0, 1e5), st.integers(1, 10**13)), min_size=1, max_size=60),
)
def test_over_any_time_little_more_is_written_than_the_limit_says(
    per_day: float, wishes: list[tuple[float, int]]
) -> None:
    """At most the rate, an hour's worth and one write more; and what is refused is refused for want of allowance."""
    budget, now_s, written, largest = WearBudget(per_day, 0.0), 0.0, 0, 0
    for pause_s, num_bytes in wishes:
        now_s += pause_s
        earned = per_day * (now_s + BURST_S) / DAY_S
        if budget.allows(now_s):
            budget.take(num_bytes)
            written, largest = written + num_bytes, max(largest, num_bytes)
        else:
            assert written >= per_day * BURST_S / DAY_S * (1 - 1e-9)
        assert written <= earned + largest + 1e-6 * earned
    assert budget.written_bytes == written


def test_a_folder_that_is_opened_for_other_weights_has_the_same_budget(tmp_path: Path) -> None:
    tier = SsdTier.open(str(tmp_path), 64 << 20, 24e6, "none", bytes(16), None)
    tier.wear.take(10_000_000)
    assert not tier.wear.allows(tier.now_s)
    tier.close()
    opened = tier.reopened(b"1" * 16)
    assert not opened.wear.allows(opened.now_s) and opened.wear.written_bytes == 10_000_000
    opened.close()
