"""Comparison of two replays of the same requests."""

from __future__ import annotations

import pytest
from evicbench.profiler.figure10 import (
    NUM_CONTEXTS,
    NUM_QUESTIONS,
    Replay,
    Served,
    beside,
    interval,
    lines_of,
    make_requests,
    moving_mean,
)


def replay(qualities: list[float], *, profiled_s: tuple[float, ...] = (), touched: int = 0, drifted: int = 1) -> Replay:
    served = [Served(float(i), i + 0.1 * (i + 1), quality) for i, quality in enumerate(qualities)]
    background_requests = {"user_steps": 100, "user_steps_touched": touched}
    counts = {"profiled": 1, "drifted": drifted, "observed": 2, "background_requests": background_requests}
    return Replay(served, profiled_s, counts, 3, 4)


def test_requests_never_ask_the_question_of_training() -> None:
    contexts, requests = make_requests([0.1 * i for i in range(300)])
    assert len(contexts) == NUM_CONTEXTS
    assert [each.arrival_s for each in requests] == pytest.approx([0.1 * i for i in range(300)])
    for each in requests:
        asked = [question.text for question in contexts[each.context].questions[1 : 1 + NUM_QUESTIONS]]
        assert each.question in asked
        assert each.prompt == contexts[each.context].prompt(each.question)
    assert make_requests([0.0, 1.0])[1] == make_requests([0.0, 1.0])[1]


def test_gains_are_counted_request_by_request() -> None:
    quality, _ = lines_of("somewhen", replay([1.0, 1.0, 1.0]), replay([1.0, 0.5, 0.6]))
    assert quality.ok
    assert quality.figure.startswith("1.000 over 0.700: +0.300")
    assert "+0.000, +0.500, +0.400 in the thirds" in quality.figure
    assert "without 3 and 4" in quality.figure


def test_a_loss_or_a_run_without_drift_is_missed() -> None:
    worse, _ = lines_of("somewhen", replay([0.5, 0.5, 0.5]), replay([1.0, 0.5, 0.6]))
    idle, _ = lines_of("somewhen", replay([1.0, 1.0, 1.0], drifted=0), replay([1.0, 0.5, 0.6]))
    assert not worse.ok and not idle.ok


@pytest.mark.parametrize(("touched", "is_ok"), [(5, True), (6, False)])
def test_steps_touched_are_limited(touched: int, is_ok: bool) -> None:
    _, latency = lines_of("somewhen", replay([1.0] * 3, touched=touched), replay([1.0] * 3))
    assert latency.ok is is_ok
    assert f"{touched} of 100 steps touched" in latency.figure


def test_requests_near_an_event_are_told_from_the_others() -> None:
    near, far = beside(replay([1.0] * 4, profiled_s=(2.1,)), width_s=0.5)
    assert near == pytest.approx([0.3])  # that from 2.0 to 2.3
    assert far == pytest.approx([0.1, 0.2, 0.4])


def test_a_moving_mean_is_of_what_is_near_in_time() -> None:
    assert moving_mean([0.0, 1.0, 5.0], [1.0, 3.0, 9.0], 2.0, [0.5, 5.0, 9.0]) == [2.0, 9.0, None]


def test_an_interval_holds_the_mean_and_is_a_point_for_equal_gains() -> None:
    assert interval([0.25] * 10) == (0.25, 0.25)
    low, high = interval([0.0, 1.0] * 50)
    assert 0.35 < low < 0.5 < high < 0.65
