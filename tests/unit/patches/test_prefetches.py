"""Prefetches of the requests that wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_evicpress.patches.tiers.prefetches import Prefetches


def test_a_second_of_reading_counts_for_all_who_wait_for_reads() -> None:
    prefetches = Prefetches(SimpleNamespace(), lambda: 0.0)  # type: ignore[arg-type]
    weights = []
    for step, (num_ready, num_loading) in enumerate([(0, 0), (3, 0), (0, 1), (2, 4), (0, 0)]):
        prefetches.observe(num_ready, num_loading, 1000.0 * step)
        weights.append((prefetches.congestion.value, prefetches.read_congestion.value))
    assert weights == [pytest.approx(pair) for pair in [(1.0, 1.0), (1.0, 1.0), (4.0, 1.0), (1.0, 1.0), (3.0, 4.0)]], (
        "what has been so since the last round, and one that waits alone delays nobody else"
    )
