"""Waiting for links and GPUs: figures computed by hand."""

from __future__ import annotations

import pytest

from sglang_evicpress.core import Tier
from sglang_evicpress.simulator.queue import MOST_CONGESTION, NO_QUEUE, Queue

TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)


def test_one_server_serves_one_after_the_other() -> None:
    queue = Queue(1.0, TIERS)
    assert queue.serve(0.0, {}, 2.0) == 2.0
    assert queue.wait_s(Tier.GPU, 0.5) == 1.5
    assert queue.serve(0.5, {}, 1.0) == 2.5
    assert queue.serve(10.0, {}, 1.0) == 1.0
    assert queue.wait_s(Tier.GPU, 12.0) == 0.0


def test_a_link_works_while_a_request_waits() -> None:
    queue = Queue(1.0, TIERS)
    queue.serve(0.0, {}, 4.0)
    assert queue.serve(0.0, {Tier.SSD: 3.0}, 1.0) == 5.0
    assert queue.wait_s(Tier.SSD, 1.0) == 2.0
    assert queue.serve(1.0, {Tier.SSD: 3.0}, 1.0) == 6.0  # the link is free at 3, its bytes are there at 6
    assert queue.wait_s(Tier.HOST, 1.0) == 0.0


def test_two_servers_drain_twice_as_fast() -> None:
    queue = Queue(2.0, TIERS)
    assert queue.serve(0.0, {Tier.SSD: 2.0}, 2.0) == 4.0
    assert (queue.wait_s(Tier.GPU, 0.0), queue.wait_s(Tier.SSD, 0.0)) == (1.0, 1.0)


def test_congestion_counts_those_that_wait() -> None:
    queue = Queue(1.0, TIERS)
    factors = []
    for _ in range(10):
        factors.append(queue.congestion(0.0))
        queue.serve(0.0, {}, 1.0)
    assert factors == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, MOST_CONGESTION, MOST_CONGESTION]
    assert queue.congestion(8.5) == 2.0  # the last one waits for its turn at 9
    assert queue.congestion(9.0) == 1.0


def test_nobody_waits_without_a_queue() -> None:
    queue = Queue(NO_QUEUE, TIERS)
    for _ in range(3):
        assert queue.serve(0.0, {Tier.HOST: 1.0, Tier.SSD: 2.0}, 4.0) == 7.0
    assert [queue.wait_s(tier, 0.0) for tier in TIERS] == [0.0] * 3
    assert queue.congestion(0.0) == 1.0


def test_congestion_on_a_shared_queue_is_divided() -> None:
    queue = Queue(2.0, TIERS)
    for _ in range(5):
        queue.serve(0.0, {}, 1.0)
    assert queue.congestion(0.0) == pytest.approx(1.0 + 4 / 2)
