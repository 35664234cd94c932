"""Nodes that requests asked to retain."""

from __future__ import annotations

import pytest

from sglang_evicpress.asked_retention import check_retention, retention_s
from sglang_evicpress.policy import retention
from sglang_evicpress.policy.retention import Retention


def test_a_node_weighs_more_until_its_time_is_over() -> None:
    held = Retention()
    held.hold(1, 10.0, 50.0)
    assert held.rate(1) == 0.02 and held.rate(2) == 0.0
    assert held.advance(59.9) == [] and held.advance(60.0) == [1]
    assert held.rate(1) == 0.0 and held.advance(100.0) == []


def test_of_several_the_strongest_counts_for_as_long_as_it_was_asked_for() -> None:
    held = Retention()
    held.hold(1, 0.0, 100.0)
    held.hold(1, 10.0, 20.0)
    held.hold(1, 10.0, 86400.0)
    assert held.rate(1) == 0.05 and held.advance(29.0) == []
    assert held.advance(30.0) == [1] and held.rate(1) == 0.01
    assert held.advance(100.0) == [1] and held.rate(1) == 1 / 86400
    held.hold(1, 99.0, 10.0)
    assert held.rate(1) == 0.1 and held.advance(109.0) == [1] and held.advance(86410.0) == [1] and len(held) == 0


def test_of_very_many_times_the_longest_are_kept() -> None:
    held = Retention()
    for seconds in range(1, 100):
        held.hold(1, 0.0, float(seconds))
    assert held.rate(1) == 1 / 96 and held.advance(99.0) == [1]


def test_the_piece_of_a_split_is_retained_as_long_and_what_is_gone_is_forgotten() -> None:
    held = Retention()
    held.hold(1, 0.0, 10.0)
    held.split(2, 1)
    held.split(3, 9)
    held.remove(1)
    assert held.rate(2) == 0.1 and held.rate(3) == 0.0 and held.advance(10.0) == [2]
    held.hold(4, 0.0, 10.0)
    held.clear()
    assert len(held) == 0 and held.advance(99.0) == []


def test_times_that_were_extended_are_not_kept() -> None:
    held = Retention()
    for now_s in range(5000):
        held.hold(1, float(now_s), 86400.0)
        held.hold(2, float(now_s), 86400.0)
    assert len(held._due) < 2 * retention.MOST_OF_A_NODE * len(held) + retention.LEAST_DUE + 2
    assert held.advance(4998.0 + 86400.0) == [] and held.advance(4999.0 + 86400.0) == [1, 2]


def test_no_more_nodes_than_are_allowed_are_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MOST_NODES", 2)
    held = Retention()
    for node_id in range(3):
        held.hold(node_id, 0.0, 10.0)
    assert len(held) == 2 and held.rate(2) == 0.0


@pytest.mark.parametrize("params", [None, {}, {"kv_retention_seconds": None}, 5])
def test_nothing_is_asked_for_without_the_field(params: object) -> None:
    check_retention(params)
    assert retention_s(params) == 0.0
    assert retention_s({"kv_retention_seconds": 60}) == 60.0
