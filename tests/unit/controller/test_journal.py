"""The record of decisions: bounded, readable from any point, in units that mean something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_evicpress.controller.journal import MOST_ABOUT, Journal
from sglang_evicpress.core import DROP, EXACT, Decision, Form, Option, Tier


def decision(node_id: int, weight: float = 4.0) -> Decision:
    source = Option(EXACT, Tier.GPU, 100)
    shrunk = Option(Form("keydiff", 0.4), Tier.GPU, 40)
    option = shrunk if node_id % 2 else DROP
    return Decision(node_id, source, option, 100 - option.num_bytes, weight, 1.0, 0.9, 0.0, 0.1, 0.8)


def numbers(journal: Journal, since: int, limit: int = 100) -> list[object]:
    entries = journal.read(since, limit)["entries"]
    assert isinstance(entries, list)
    return [entry["number"] for entry in entries]


def test_entries_are_read_in_order_from_any_point() -> None:
    journal = Journal()
    for node_id in range(5):
        journal.add(decision(node_id), float(node_id), 1.0)
    assert numbers(journal, 0) == [1, 2, 3, 4, 5]
    assert numbers(journal, 3) == [4, 5]
    assert numbers(journal, 0, 2) == [1, 2]
    assert journal.read(0, 2)["last"] == 2
    assert (numbers(journal, 5), journal.read(5, 2)["last"]) == ([], 5)
    assert (numbers(journal, 99), journal.read(99, 2)["last"]) == ([], 5)


def test_the_oldest_make_room_and_are_counted() -> None:
    journal = Journal(length=3)
    for node_id in range(10):
        journal.add(decision(node_id), 0.0, 1.0)
    assert numbers(journal, 0) == [8, 9, 10]
    assert (journal.read(0, 9)["num_lost"], journal.read(7, 9)["num_lost"], journal.read(5, 9)["num_lost"]) == (7, 0, 2)
    assert journal.read(0, 9)["num_decisions"] == 10
    assert numbers(journal, 8) == [9, 10]


def test_losses_are_summed_in_hits_of_their_times_and_stay_when_entries_go() -> None:
    journal = Journal(length=2)
    assert journal.lost == 0.0
    for value_of_hit in (1.0, 2.0, 4.0):
        journal.add(decision(1), 0.0, value_of_hit)
    assert journal.lost == pytest.approx(0.8 + 0.4 + 0.2)
    journal.add(replace(decision(1), loss=-0.3), 0.0, 1.0)
    assert journal.lost == pytest.approx(1.1)


def test_an_entry_has_the_alpha_of_its_time() -> None:
    journal = Journal()
    for alpha in (None, 3.0, 0.5):
        journal.add(decision(1), 0.0, 1.0, alpha=alpha)
    entries = journal.read(0, 9)["entries"]
    assert isinstance(entries, list)
    assert [entry.get("alpha") for entry in entries] == [None, 3.0, 0.5]
    assert "alpha" not in entries[0]


def test_an_empty_journal_says_so() -> None:
    assert Journal().read(0, 5) == {"num_decisions": 0, "num_lost": 0, "last": 0, "next": None, "entries": []}


def test_an_entry_shows_what_the_decision_rested_on_in_hits_of_its_time() -> None:
    journal = Journal()
    journal.add(decision(7), 12.5, 2.0, occasion="idle")
    (entry,) = journal.about(7)
    assert entry == {
        "number": 1,
        "time_s": 12.5,
        "node_id": 7,
        "kind": "compress",
        "occasion": "idle",
        "from": "exact/gpu",
        "to": "keydiff@0.4/gpu",
        "bytes_before": 100,
        "bytes": 40,
        "freed_bytes": 60,
        "weight": 2.0,
        "quality_before": 1.0,
        "quality": 0.9,
        "delay_before_s": 0.0,
        "delay_s": 0.1,
        "loss": 0.4,
        "reason": "keydiff@0.4/gpu: loses 0.4 over 60 bytes",
    }
    assert journal.about(8) == []


def test_of_one_node_the_last_entries_are_told_oldest_first() -> None:
    journal = Journal()
    for number in range(MOST_ABOUT + 50):
        journal.add(decision(7), float(number), 1.0)
        journal.add(decision(8), float(number), 1.0)
    told = journal.about(7)
    assert [entry["time_s"] for entry in told] == [float(number) for number in range(50, MOST_ABOUT + 50)]
