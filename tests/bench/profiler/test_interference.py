"""Figures from rounds of load on two servers that take turns."""

from __future__ import annotations

from typing import Any

import pytest
from evicbench.profiler.interference import Round, Rounds, lines_of
from evicbench.streams import Streamed


def stream(gap_s: float, ttft_s: float = 0.5, count: int = 20) -> Streamed:
    return Streamed(ttft_s, (gap_s,) * count, None)


def on(gap_s: float, ttft_s: float = 0.5, **counts: Any) -> Round:
    return Round([stream(gap_s, ttft_s)], **{"num_steps": 100, "num_tokens": 7, "num_left": 1, **counts})


def rounds(gaps_on: list[float], gaps_off: list[float], **counts: Any) -> Rounds:
    return Rounds([on(gap, **counts) for gap in gaps_on], [Round([stream(gap)]) for gap in gaps_off])


def test_ratios_are_of_pairs_and_of_all() -> None:
    found = rounds([0.01, 0.02, 0.09], [0.01, 0.01, 0.03])
    assert found.ratio(0.95) == pytest.approx(2.0)
    assert found.ratio_of_all(0.95) == pytest.approx(3.0)
    assert found.step_s == pytest.approx(0.01)


@pytest.mark.parametrize(("gap_s", "is_ok"), [(0.0109, True), (0.0112, False)])
def test_tokens_that_come_later_are_missed(gap_s: float, is_ok: bool) -> None:
    itl, _ = lines_of("somehow", rounds([gap_s] * 3, [0.01] * 3))
    assert itl.ok is is_ok


def test_profiling_that_ran_out_of_work_proves_nothing() -> None:
    itl, _ = lines_of("somehow", rounds([0.01] * 3, [0.01] * 3, num_left=0))
    assert not itl.ok
    assert "NOT busy" in itl.figure


@pytest.mark.parametrize(("held_up", "later_s", "is_ok"), [(0, 0.009, True), (0, 0.02, False), (1, 0.0, False)])
def test_a_user_waits_for_one_step_at_most(held_up: int, later_s: float, is_ok: bool) -> None:
    pairs = Rounds([on(0.01, 0.5 + later_s, num_held_up=held_up)], [Round([stream(0.01)])])
    _, ttft = lines_of("somehow", pairs)
    assert ttft.ok is is_ok
