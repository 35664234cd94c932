"""Expected turns: by Little's formula, from a rate that only time with a queue is measured in."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from sglang_evicpress.policy.turns import LEAST_ADMITTED, MEMORY_S, Turns


class Rounds:
    """Scheduler rounds that tell ``turns`` what came of them."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.turns = Turns()
        self.now_s = start_s

    def serve(self, every_s: float, for_s: float, batch: int = 1, steps: int = 1, waiting: int = 20) -> None:
        """``batch`` are admitted ``every_s``, in the last of ``steps`` rounds, and ``waiting`` stay."""
        for _ in range(round(for_s / every_s)):
            for step in range(steps):
                self.now_s += every_s / steps
                self.turns.observe(self.now_s, waiting, batch if step == steps - 1 else 0)


def served(*args: float, **kwargs: int) -> Rounds:
    rounds = Rounds()
    rounds.turns.observe(rounds.now_s, 20, 0)
    rounds.serve(*args, **kwargs)
    return rounds


def test_nothing_known_is_no_wait() -> None:
    turns = Turns()
    assert turns.rate is None
    assert turns.wait_s(100) == 0.0


@pytest.mark.parametrize("every_s", [0.01, 0.2, 3.0, 20.0])
def test_a_steady_service_is_known_to_within_two_percent(every_s: float) -> None:
    turns = served(every_s, max(30.0, 20 * every_s)).turns
    assert turns.rate == pytest.approx(1 / every_s, rel=0.02)
    assert turns.wait_s(7) == pytest.approx(7 * every_s, rel=0.02)


def test_none_ahead_is_no_wait() -> None:
    assert served(0.2, 10.0).turns.wait_s(0) == 0.0


def test_batches_do_not_swing_it() -> None:
    """16 at once, each second: a plain moving average goes from 14.5 to 17.7 and back."""
    rounds = served(1.0, 30.0, batch=16, steps=20)
    for _ in range(40):
        rounds.serve(1.0 / 20, 1.0 / 20, batch=0)
        if rounds.now_s - 1030.0 < 0.99:
            assert rounds.turns.rate == pytest.approx(16, rel=0.01)
    assert rounds.turns.rate is not None and rounds.turns.rate < 15  # a second batch's time with no batch


@pytest.mark.parametrize(("before_s", "after_s"), [(0.1, 0.5), (0.5, 0.1)])
def test_a_change_is_followed(before_s: float, after_s: float) -> None:
    rounds = served(before_s, 60.0)
    rounds.serve(after_s, 5 * MEMORY_S)
    assert rounds.turns.rate == pytest.approx(1 / after_s, rel=0.05)


def test_a_service_that_stops_is_seen_before_its_next_admission() -> None:
    rounds = served(0.1, 60.0)
    before_s = rounds.turns.wait_s(10)
    waits = []
    for _ in range(10):
        rounds.serve(10.0, 10.0, batch=0)
        waits.append(rounds.turns.wait_s(10))
    assert waits == sorted(waits) and waits[0] > 2 * before_s
    assert waits[-1] > 10.0


def test_a_gap_without_a_queue_is_not_service_time() -> None:
    rounds = served(0.2, 20.0)
    rounds.now_s += 0.2
    rounds.turns.observe(rounds.now_s, 0, 1)
    before = rounds.turns.rate
    rounds.turns.observe(rounds.now_s + 3600, 0, 0)
    rounds.turns.observe(rounds.now_s + 7200, 3, 0)
    assert rounds.turns.rate == before
    rounds.now_s += 7200
    rounds.serve(0.2, 5.0)
    assert rounds.turns.rate == pytest.approx(5, rel=0.01)


@pytest.mark.parametrize(("step_s", "num_waiting"), [(1.0, 0), (0.0, 20)])
def test_who_is_admitted_without_waiting_and_a_clock_that_never_moves_say_nothing(
    step_s: float, num_waiting: int
) -> None:
    turns = Turns()
    for round_ in range(100):
        turns.observe(round_ * step_s, num_waiting, 3)
    assert turns.rate is None


def test_the_last_of_a_queue_do_not_make_a_server_look_slow() -> None:
    """17 come at once, every 10 s, to one that takes 16 in half a second: it could take 32/s, not 2."""
    turns = Turns()
    for burst in range(20):
        turns.observe(burst * 10.0, 1, 16)
        turns.observe(burst * 10.0 + 0.5, 0, 1)
        turns.observe(burst * 10.0 + 1.0, 0, 0)
    assert turns.rate == pytest.approx(32, rel=0.01)


def test_a_batch_of_long_ago_does_not_speak_for_the_next_queue() -> None:
    turns = Turns()
    for request in range(20):
        start_s = request * 10.0
        turns.observe(start_s, 0, 50)
        turns.observe(start_s + 1.0, 0, 0)
        turns.observe(start_s + 2.0, 1, 0)
        turns.observe(start_s + 2.5, 0, 1)
    assert turns.rate == pytest.approx(2, rel=0.01)


def test_a_clock_that_stands_still_loses_nothing() -> None:
    """The time moves in one round of five, as where it comes with received requests: admissions and time are whole in
    the long run."""
    turns = Turns()
    turns.observe(0.0, 20, 0)
    for round_ in range(1, 1001):
        turns.observe(round_ // 5 * 0.5, 20, 1)
    assert turns.rate == pytest.approx(10, rel=0.1)


def test_a_queue_that_went_while_the_clock_stood_still_says_nothing() -> None:
    """200 are served in no time that could be seen; then nobody came for a minute."""
    rounds = served(0.2, 20.0)
    before = rounds.turns.rate
    for waiting in range(199, -1, -1):
        rounds.turns.observe(rounds.now_s, waiting, 1)
    rounds.turns.observe(rounds.now_s, 5, 0)
    rounds.turns.observe(rounds.now_s + 60.0, 4, 1)
    assert rounds.turns.rate == pytest.approx(before)


def test_one_slow_start_is_not_yet_a_rate() -> None:
    turns = Turns()
    turns.observe(0.0, 100, 0)
    turns.observe(2.0, 99, 1)
    assert turns.wait_s(99) == 0.0
    for request in range(1, LEAST_ADMITTED):
        turns.observe(2.0 + request * 0.1, 99, 1)
    assert turns.wait_s(99) > 0.0


def random_rounds(generator: random.Random) -> Iterator[tuple[float, int, int]]:
    now_s = generator.choice([0.0, 1e-3, 1e6])
    for _ in range(400):
        now_s += generator.choice([0.0, 0.0, 1e-9, 1e-3, 0.05, 1.0, 300.0, 1e5, -0.5]) * generator.random()
        yield now_s, generator.choice([0, 0, 1, 5, 10_000]), generator.choice([0, 0, 0, 1, 3, 256])


@pytest.mark.parametrize("seed", range(50))
def test_no_sequence_of_rounds_makes_it_senseless(seed: int) -> None:
    turns = Turns()
    for rounds in random_rounds(random.Random(seed)):
        turns.observe(*rounds)
        assert turns.rate is None or (math.isfinite(turns.rate) and turns.rate > 0.0)
        waits = [turns.wait_s(ahead) for ahead in (0, 1, 2, 10_000)]
        assert all(math.isfinite(wait) and wait >= 0.0 for wait in waits)
        assert waits == sorted(waits)
