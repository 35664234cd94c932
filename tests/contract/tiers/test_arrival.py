"""Tests that an idle scheduler is woken up by threads of the tiers and by messages alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from sglang_evicpress.patches.tiers.arrival import Arrival

LONG_S = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    inlet, outlet = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inlet.bind("inproc://requests")
    outlet.connect("inproc://requests")
    yield inlet, outlet
    context.destroy(linger=0)


def test_nothing_has_come_when_the_time_is_over() -> None:
    assert not Arrival().wait(0.001)


def test_a_thread_ends_the_wait_and_one_that_came_before_it() -> None:
    arrival = Arrival()
    threading.Timer(0.01, arrival.set).start()
    assert arrival.wait(LONG_S)
    assert arrival.wait(LONG_S)  # until it is cleared
    arrival.set()
    arrival.clear()
    assert not arrival.wait(0.0)


def test_a_message_ends_the_wait(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    inlet, outlet = pair
    arrival = Arrival()
    arrival.watch((inlet, None, object()))  # a rank without sockets has None
    assert not arrival.wait(0.0)
    threading.Timer(0.01, outlet.send, [b"request"]).start()
    begin = time.monotonic()
    assert arrival.wait(LONG_S)
    assert time.monotonic() - begin < LONG_S / 2
    inlet.recv()
    assert not arrival.wait(0.0)
