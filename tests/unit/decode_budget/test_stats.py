from __future__ import annotations

import json

import pytest

from sglang_evicpress.decode_budget.settings import DecodeSettings
from sglang_evicpress.decode_budget.stats import NUM_PASSES_SHOWN, PassRecord, RequestStats, Totals


def record(kind="repack", before=192, after=128, pages=4, copies=50.0, seconds=0.25):
    return PassRecord(kind, 1000, before, after, pages, copies, seconds)


def test_a_pass_counts_for_its_request_and_for_the_server():
    totals, first, second = Totals(num_requests=2), RequestStats(), RequestStats()
    totals.add(first, record())
    totals.add(first, record("page", 128, 112, 1, 0.0, 0.5))
    totals.add(second, record("unshare", 100, 100, 0, 64.0, 0.125))
    assert first.counts.to_json() == {
        "passes": 2,
        "tokens_evicted": 80,
        "pages_freed": 5,
        "slot_copies": 50.0,
        "seconds": 0.75,
        "longest_pass_seconds": 0.5,
    }
    assert totals.to_json() == {
        "requests": 2,
        "passes": 3,
        "tokens_evicted": 80,
        "pages_freed": 5,
        "slot_copies": 114.0,
        "seconds": 0.875,
        "longest_pass_seconds": 0.5,
        "passes_deferred": 0,
        "passes_by_kind": {"repack": 1, "page": 1, "unshare": 1},
    }


def test_copies_that_come_later_are_counted_once():
    totals, stats, late = Totals(), RequestStats(), record(copies=None)
    totals.add(stats, late)
    assert stats.to_json(DecodeSettings(128), 1000, 128)["last_passes"][0]["slot_copies"] is None
    assert totals.counts.slot_copies == 0
    totals.settle(stats, late, 12.5)
    assert (late.copies, stats.counts.slot_copies, totals.counts.slot_copies) == (12.5, 12.5, 12.5)
    with pytest.raises(ValueError, match="copies of this pass are 12.5"):
        totals.settle(stats, late, 1.0)


def test_a_request_shows_its_budget_and_its_last_passes():
    stats, totals = RequestStats(), Totals()
    for number in range(NUM_PASSES_SHOWN + 4):
        totals.add(stats, record(copies=float(number)))
    stats.see(192)
    stats.see(128)
    shown = json.loads(json.dumps(stats.to_json(DecodeSettings(256, "repack", "keydiff"), 1064, 192)))
    assert [entry["slot_copies"] for entry in shown.pop("last_passes")] == list(range(4, NUM_PASSES_SHOWN + 4))
    assert shown == {
        "budget_tokens": 256,
        "method": "repack",
        "score": "keydiff",
        "logical_tokens": 1064,
        "slots": 192,
        "peak_slots": 192,
        "budget_occupancy": 0.75,
        "passes": NUM_PASSES_SHOWN + 4,
        "tokens_evicted": 64 * (NUM_PASSES_SHOWN + 4),
        "pages_freed": 4 * (NUM_PASSES_SHOWN + 4),
        "slot_copies": float(sum(range(NUM_PASSES_SHOWN + 4))),
        "seconds": 0.25 * (NUM_PASSES_SHOWN + 4),
        "longest_pass_seconds": 0.25,
    }


def test_a_pass_is_shown_with_what_it_dropped():
    assert record().to_json() == {
        "kind": "repack",
        "logical_tokens": 1000,
        "slots_before": 192,
        "slots_after": 128,
        "tokens_evicted": 64,
        "pages_freed": 4,
        "slot_copies": 50.0,
        "seconds": 0.25,
    }
