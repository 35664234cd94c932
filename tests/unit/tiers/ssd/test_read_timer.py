"""The meter of reads: what overlaps is one measurement."""

from __future__ import annotations

import pytest

from sglang_evicpress.tiers.ssd.read_timer import MOST_TOGETHER, ReadTimer


def test_reads_one_after_the_other_are_measured_one_by_one() -> None:
    timer = ReadTimer()
    timer.begin(1.0)
    assert timer.end(1.5, 100) == (100, 0.5)
    timer.begin(3.0)
    assert timer.end(3.25, 10) == (10, 0.25)


@pytest.mark.parametrize(
    ("first", "then", "measured"),
    [
        ((1.0, 1000), (1.001, 1), (1001, 1.001)),  # a small read behind a large one
        ((1.0, 0), (2.0, 50), (50, 2.0)),  # what failed takes time and brings nothing
    ],
)
def test_reads_at_once_are_measured_together(
    first: tuple[float, int], then: tuple[float, int], measured: tuple[int, float]
) -> None:
    timer = ReadTimer()
    timer.begin(0.0)
    timer.begin(0.0)
    assert timer.end(*first) is None
    assert timer.end(*then) == measured


def test_a_chain_of_overlapping_reads_is_one_measurement() -> None:
    timer = ReadTimer()
    timer.begin(0.0)
    timer.begin(0.5)
    assert timer.end(1.0, 10) is None
    timer.begin(1.5)
    assert timer.end(2.0, 10) is None
    assert timer.end(3.0, 10) == (30, 3.0)


def test_without_a_pause_there_is_a_measurement_all_the_same() -> None:
    timer, found = ReadTimer(), []
    timer.begin(0.0)
    for number in range(3 * MOST_TOGETHER):
        timer.begin(float(number))
        found.append(timer.end(number + 1.0, 7))
    told = [one for one in found if one is not None]
    assert told == [(7 * MOST_TOGETHER, float(MOST_TOGETHER))] * 3
