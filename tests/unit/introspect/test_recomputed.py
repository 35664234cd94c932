"""Recomputed tokens by reason."""

from __future__ import annotations

import pytest

from sglang_evicpress.introspect import recomputed
from sglang_evicpress.introspect.recomputed import TAIL_TOKENS, Drop, Recomputed, place_of

TOKENS = list(range(1000, 1400))


def dropped(counts: Recomputed, begin: int, end: int, *, reason: str = "forced", had_room: bool = True) -> Drop:
    drop = Drop(end - begin, 0.5, reason, had_room, number=begin)
    counts.drop(place_of(TOKENS[:begin], TOKENS[begin : begin + 16], begin, None), drop)
    return drop


def test_tokens_are_new_until_something_else_is_known_of_them() -> None:
    counts = Recomputed()
    counts.admit(400, 100)
    counts.blame("late", 120)
    assert counts.describe(0.25) == {
        "requests": 1,
        "prompt_tokens": 400,
        "computed_tokens": {"new": 180, "late": 120},
        "not_worth_s": {"load": 0.0, "predicted": 0.0, "actual": 0.25},
    }


def test_what_was_dropped_is_missed_once_and_piece_by_piece() -> None:
    counts = Recomputed()
    above, below = dropped(counts, 100, 200), dropped(counts, 200, 300, reason="best_by_utility", had_room=False)
    counts.admit(400, 100)
    assert counts.miss(TOKENS, 100, None, 16) == [above, below]
    assert counts.computed == {"new": 100, "dropped": 100, "dropped_full": 100}
    assert counts.miss(TOKENS, 100, None, 16) == []
    told = counts.describe_drops()
    assert told["forced"] == {"nodes": 1, "tokens": 100, "missed_tokens": 100, "missed_s": 0.5}


def test_a_prompt_that_ends_inside_what_was_dropped_misses_that_much() -> None:
    counts = Recomputed()
    dropped(counts, 100, 300)
    counts.admit(150, 100)
    counts.miss(TOKENS[:150], 100, None, 16)
    assert counts.computed["dropped"] == 50 and counts.drops["forced"].missed_s == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("tokens", "begin", "namespace"),
    [
        (TOKENS, 101, None),
        (TOKENS, 100, "other"),
        ([*TOKENS[:99], 7, *TOKENS[100:]], 100, None),
        ([*TOKENS[:100], 7, *TOKENS[101:]], 100, None),
    ],
)
def test_another_place_misses_nothing(tokens: list[int], begin: int, namespace: str | None) -> None:
    counts = Recomputed()
    dropped(counts, 100, 300)
    assert counts.miss(tokens, begin, namespace, 16) == []


def test_what_lies_far_before_a_place_does_not_matter() -> None:
    far = [7] * (200 - TAIL_TOKENS) + TOKENS[200 - TAIL_TOKENS : 200]
    assert place_of(TOKENS[:200], TOKENS[200:216], 200, None) == place_of(far, TOKENS[200:216], 200, None)


def test_only_the_last_drops_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "MOST_DROPS", 2)
    counts = Recomputed()
    for begin in (100, 200, 300):
        dropped(counts, begin, begin + 50)
    assert counts.miss(TOKENS, 100, None, 16) == [] and len(counts.miss(TOKENS, 300, None, 16)) == 1
    assert counts.drops["forced"].nodes == 3
