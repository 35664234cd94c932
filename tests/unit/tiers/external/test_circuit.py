"""A store that fails or hangs is left alone, and tried again."""

from __future__ import annotations

import threading

import pytest

from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.external import circuit as circuits
from sglang_evicpress.tiers.external.circuit import FIRST_PAUSE_S, LONGEST_PAUSE_S, Circuit
from sglang_evicpress.tiers.external.gain import LookupGain


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def circuit(now_s: list[float]) -> Circuit:
    return Circuit("test", lambda: now_s[0])


def fail(circuit: Circuit) -> None:
    with pytest.raises(OSError, match="gone"), circuit.call("read", 0):
        raise OSError("gone")


def test_reads_pause_after_a_failure_and_longer_each_time(circuit: Circuit, now_s: list[float]) -> None:
    pauses = []
    for _ in range(8):
        assert circuit.may_read
        fail(circuit)
        assert not circuit.may_read and circuit.may_write
        begin = now_s[0]
        while not circuit.may_read:
            now_s[0] += 0.25
        pauses.append(now_s[0] - begin)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (FIRST_PAUSE_S, LONGEST_PAUSE_S) == (1.0, 30.0) and circuit.num_trips == circuit.errors["read_failed"] == 8


def test_a_success_makes_the_next_pause_short_again(circuit: Circuit, now_s: list[float]) -> None:
    fail(circuit)
    now_s[0] = 1.0
    fail(circuit)
    now_s[0] = 5.0
    with circuit.call("read", 0):
        pass
    fail(circuit)
    now_s[0] = 6.0
    assert circuit.may_read


def test_a_store_that_takes_some_and_then_no_more_is_left_alone_longer_each_time(
    circuit: Circuit, now_s: list[float]
) -> None:
    pauses = []
    for _ in range(6):
        with circuit.call("write", 4):
            pass  # kept
        with circuit.call("write", 4):
            pass  # asked, and not kept
        circuit.fail("write", "it took no 4 bytes")
        begin = now_s[0]
        while not circuit.may_write:
            now_s[0] += 0.25
        pauses.append(now_s[0] - begin)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_failures_within_a_pause_count_and_do_not_make_it_longer(circuit: Circuit, now_s: list[float]) -> None:
    for _ in range(3):  # of calls that several threads had begun
        circuit.fail("read", "gone")
    now_s[0] = FIRST_PAUSE_S
    assert circuit.may_read and circuit.errors["read_failed"] == 3 and circuit.num_trips == 1


def test_whatever_an_engine_raises_is_a_failure_but_a_bad_entry(circuit: Circuit, now_s: list[float]) -> None:
    with pytest.raises(BadEntry), circuit.call("read", 0):
        raise BadEntry("length")
    assert circuit.may_read
    with pytest.raises(OSError, match="KeyError: 'gone'"), circuit.call("read", 0):
        raise KeyError("gone")
    with pytest.raises(BadEntry, match="left alone"), circuit.call("read", 0):
        pytest.fail("it was called")


def test_nothing_is_asked_while_a_call_hangs(monkeypatch: pytest.MonkeyPatch, circuit: Circuit) -> None:
    monkeypatch.setattr(circuits, "HANG_S", 0.05)
    has_begun, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        with circuit.call("write", 0):
            has_begun.set()
            may_end.wait(30.0)

    thread = threading.Thread(target=hang)
    thread.start()
    assert has_begun.wait(30.0) and circuit.may_read
    assert not may_end.wait(0.2) and not circuit.may_read and not circuit.may_write
    may_end.set()
    thread.join()
    assert circuit.may_read and circuit.may_write and circuit.errors == {"deadline": 1}


def test_a_request_waits_for_lookups_that_save_more_than_they_take() -> None:
    gain = LookupGain()
    assert gain.is_worth_waiting(0.01)  # nothing is known yet
    for _ in range(100):
        gain.observe(0.002, is_hit=False)
    assert gain.hit_share < 1e-4 and not gain.is_worth_waiting(1.0)
    for _ in range(10):
        gain.observe(0.002, is_hit=True)
    assert gain.is_worth_waiting(0.01) and not gain.is_worth_waiting(0.002)
