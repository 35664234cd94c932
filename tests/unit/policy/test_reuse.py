"""Rates of reuse: what is counted, what is made of it, and what each event costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.policy import reuse
from sglang_evicpress.policy.reuse import BORDERS_S, FADE, NUM_AGES, History, ReuseModel, kind_of
from sglang_evicpress.policy.reuse_tracker import MOST_GROWN, MOST_REVISED, ReuseTracker


def advance(tracker: ReuseTracker, now_s: float) -> None:
    while tracker.is_behind(now_s):
        tracker.advance(now_s)


def live(tracker: ReuseTracker, uses: Iterable[tuple[float, int]], tokens: int = 2000) -> None:
    """Nodes by id, each new at its first use, none of them anybody's child."""
    known = set[int]()
    for now_s, node_id in uses:
        advance(tracker, now_s)
        if node_id in known:
            tracker.observe_request(node_id, now_s)
            tracker.use(node_id, now_s)
        else:
            tracker.add(node_id, now_s, tokens, 0)
            known.add(node_id)


def poisson(gap_of: Callable[[int], float], num_nodes: int, seconds: float, seed: int = 1) -> list[tuple[float, int]]:
    draw = random.Random(seed)
    uses = list[tuple[float, int]]()
    for node in range(num_nodes):
        now_s = draw.random()
        while now_s < seconds:
            uses.append((now_s, node))
            now_s += draw.expovariate(1.0 / gap_of(node))
    return sorted(uses)


def test_independent_uses_are_told_by_their_rates() -> None:
    gaps = [2.0, 6.0, 18.0, 54.0]
    tracker = ReuseTracker()
    live(tracker, poisson(lambda node: gaps[node % 4], 40, 1000.0))
    advance(tracker, 1000.0)
    rates = [[tracker.rate(node) for node in range(group, 40, 4)] for group in range(4)]
    for gap_s, group in zip(gaps, rates, strict=True):
        assert math.exp(float(np.mean(np.log(group)))) == pytest.approx(1.0 / gap_s, rel=0.5)
    assert min(rates[0]) > max(rates[2]) and min(rates[1]) > max(rates[3])


def test_what_is_used_in_a_burst_and_then_no_more_sinks_below_what_comes_back_slowly() -> None:
    draw = random.Random(2)
    uses = list[tuple[float, int]]()
    for burst in range(60):  # sessions of ten uses a second apart, which then end
        uses += [(10.0 * burst + index + draw.random() / 4, burst) for index in range(10)]
    uses += [(25.0 * index + draw.random(), 1000 + node) for index in range(25) for node in range(4)]
    tracker = ReuseTracker()
    now_s = 597.0  # in the middle of the last session
    live(tracker, sorted(use for use in uses if use[0] < now_s))
    advance(tracker, now_s)
    slow = [tracker.rate(1000 + node) for node in range(4)]
    in_burst, ended = tracker.rate(59), [tracker.rate(burst) for burst in range(50)]
    assert in_burst > max(slow) > min(slow) > max(ended)


def test_nodes_used_once_are_told_apart_by_size_and_place() -> None:
    tracker = ReuseTracker()
    now_s, node = 0.0, 0
    for _ in range(400):  # questions of 50 tokens about documents of 2,000: the documents are asked about again
        tracker.add(node, now_s, 2000, 0)
        tracker.add(node + 1, now_s, 50, 3)
        now_s += 1.0
        advance(tracker, now_s)
        tracker.use(node, now_s)
        node += 2
    tracker.add(node, now_s, 2000, 0)
    tracker.add(node + 1, now_s, 50, 3)
    assert tracker.rate(node) > 5.0 * tracker.rate(node + 1)
    assert kind_of(2000, 0) == kind_of(2000, 2) != kind_of(2000, 1) and kind_of(128, 1) != kind_of(129, 1)


def test_before_anything_is_seen_the_rate_falls_with_age() -> None:
    tracker = ReuseTracker()
    tracker.add(1, 0.0, 100, 0)
    rates = []
    for border_s in BORDERS_S[1:]:
        rates.append(tracker.rate(1))
        assert tracker.advance(border_s) == [1]
    assert rates == sorted(rates, reverse=True) and rates[0] > 20.0 * rates[-1] > 0.0
    assert not tracker.is_behind(1e9) and tracker.advance(1e9) == []


def test_few_nodes_grow_older_in_a_call_and_who_waits_longest_is_first() -> None:
    tracker = ReuseTracker()
    for node in range(10):
        tracker.add(node, 0.0, 100, 0)
    assert tracker.advance(1.0, most_grown=3) == [0, 1, 2]
    assert tracker.advance(1.0, most_grown=3) == [3, 4, 5]
    assert tracker.advance(100.0, most_grown=3) == [6, 7, 8]
    assert tracker.advance(100.0, most_grown=3) == [9, 0, 1], "who has waited through some ages is through them at once"
    assert tracker.advance(100.0, most_grown=8) == [2, 3, 4, 5]


def test_pieces_of_a_split_node_have_been_used_alike_and_go_on_alone() -> None:
    tracker = ReuseTracker()
    live(tracker, [(0.0, 1), (5.0, 1), (9.0, 1)])
    advance(tracker, 10.0)
    tracker.split(2, 1)
    assert tracker.rate(2) == tracker.rate(1)
    tracker.use(2, 11.0)
    assert tracker.rate(2) > tracker.rate(1)
    tracker.remove(1)
    with pytest.raises(KeyError):
        tracker.rate(1)
    assert tracker.advance(100.0) == [2] and len(tracker) == 1


def test_ages_are_learned_alike_where_calls_lag_behind() -> None:
    prompt, late = ReuseTracker(), ReuseTracker()
    for tracker in (prompt, late):
        for node in range(40):
            tracker.add(node, 0.0, 100, 0)
    for step in range(1, 600):
        while prompt.is_behind(step / 10):
            prompt.advance(step / 10)
    for tracker in (prompt, late):
        for node in range(20):
            tracker.use(node, 60.0)
        tracker.split(50, 30)
        tracker.remove(31)
    assert (prompt.model._uses == late.model._uses).all() and prompt.model._uses.sum() == 20
    for tracker in (prompt, late):
        while tracker.is_behind(60.0):
            tracker.advance(60.0)
        tracker.model.learn()
    assert (prompt.model._halves == late.model._halves).all()
    assert [prompt.rate(node) for node in range(31)] == [late.rate(node) for node in range(31)]


def test_ids_of_nodes_that_are_gone_do_not_pile_up() -> None:
    tracker = ReuseTracker()
    for node in range(2000):
        tracker.add(node, 0.0, 100, 0)
        if node >= 100:
            tracker.remove(node - 100)
        if node % 10 == 0:
            tracker.advance(0.0)
    assert len(tracker._ring) < 4 * len(tracker)


def test_a_call_does_a_bounded_number_of_nodes_and_the_next_goes_on() -> None:
    tracker = ReuseTracker()
    for node in range(3 * MOST_GROWN):
        tracker.add(node, 0.0, 100, 0)
    done = list[int]()
    for _ in range(3):
        done += (once := tracker.advance(BORDERS_S[1]))
        assert len(once) == MOST_GROWN
    assert sorted(done) == list(range(3 * MOST_GROWN)) and not tracker.is_behind(BORDERS_S[1])
    tracker.use(0, BORDERS_S[1])  # the first use of all: rates are worked out anew
    seen = set[int]()
    while tracker.is_behind(BORDERS_S[1]):
        seen.update(once := tracker.advance(BORDERS_S[1]))
        assert len(once) <= MOST_REVISED
    assert seen == set(range(3 * MOST_GROWN))


def test_hundreds_of_uses_between_two_calls_leave_no_node_behind() -> None:
    """As requests with long paths that come at once: outdated entries are not counted as nodes that grow older."""
    tracker = ReuseTracker()
    for node in range(600):
        tracker.add(node, 0.0, 100, 0)
    for index in range(1, 60):
        now_s = 2.0 * index
        for node in range(500):
            tracker.use(node, now_s)
        for _ in range(20):  # rounds until the next come
            tracker.advance(now_s + 1.9)
        assert not [entry for entry in tracker._due if entry[0] <= now_s + 1.9]
    assert len(tracker._due) <= 2 * 600
    assert tracker.rate(599) < tracker.rate(0) / 20.0


def test_ids_of_nodes_that_are_gone_are_forgotten_without_any_use() -> None:
    tracker = ReuseTracker()
    for node in range(5_000):
        tracker.add(node, float(node), 100, 0)
        if node >= 50:
            tracker.remove(node - 50)
        tracker.advance(float(node))
    assert len(tracker) == 50 and len(tracker._ring) < 100


def test_a_piece_of_a_split_node_is_counted_as_a_node_that_came_as_far() -> None:
    """Else the half that is used, of many nodes that part, would make their class look twice as likely to be."""
    tracker = ReuseTracker()
    for node in range(0, 2000, 2):
        tracker.add(node, 0.0, 2000, 0)
    advance(tracker, 10.0)
    for node in range(0, 2000, 2):
        tracker.split(node + 1, node)
        tracker.use(node + 1, 10.0)
        tracker.remove(node)
    model = tracker.model
    row, age = kind_of(2000, 0), History(0, 0.0).age
    while BORDERS_S[age + 1] <= 10.0:
        age += 1
    assert model._uses[row, age] == 1000 and model._halves[row, age] == 3000


def test_a_node_that_does_not_count_teaches_nothing() -> None:
    tracker, alone = ReuseTracker(), ReuseTracker()
    for each in (tracker, alone):
        each.add(1, 0.0, 2000, 0)
    for node in range(10, 60):
        tracker.add(node, 0.0, 2000, 0, counts=False)
    advance(tracker, 500.0)
    advance(alone, 500.0)
    tracker.remove(10)
    tracker.use(11, 500.0)
    assert (tracker.model._halves == alone.model._halves).all() and not tracker.model._uses.any()


def test_entries_of_past_uses_do_not_pile_up() -> None:
    tracker = ReuseTracker()
    tracker.add(1, 0.0, 100, 0)
    for index in range(1, 20_000):
        tracker.advance(0.03 * index)
        tracker.use(1, 0.03 * index)
    assert len(tracker._due) < 10


def test_a_flush_forgets_nodes_and_keeps_what_was_learned() -> None:
    tracker = ReuseTracker()
    live(tracker, poisson(lambda node: 3.0, 20, 200.0))
    gap_s, num_uses = tracker.model.typical_gap_s, tracker.model.num_uses
    tracker.clear()
    assert len(tracker) == 0 and not tracker.advance(1e6)
    assert (tracker.model.typical_gap_s, tracker.model.num_uses) == (gap_s, num_uses) and num_uses > 500
    assert tracker.describe() == {"num_uses": num_uses, "typical_gap_s": gap_s, "horizon_s": tracker.model.horizon_s}


def test_old_counts_fade() -> None:
    model = ReuseModel()
    history = History(kind_of(100, 0), 0.0)
    model.begin(history)
    for index in range(1, 3 * FADE):
        model.use(history, float(index))
    assert model._uses.sum() < 2 * FADE and model._halves.sum() < 5 * FADE


events = st.lists(st.tuples(st.sampled_from(["add", "use", "split", "remove", "wait"]), st.integers(0, 7)), max_size=80)


@given(events, st.floats(0.001, 500.0))
def test_rates_are_numbers_above_0_and_alike_on_two_ranks(steps: list[tuple[str, int]], pause_s: float) -> None:
    ranks = [ReuseTracker(), ReuseTracker()]
    known, now_s = list[int](), 0.0
    for number, (what, which) in enumerate(steps):
        now_s += pause_s
        node = known[which % len(known)] if known else None
        for tracker in ranks:
            tracker.advance(now_s)
            if what == "add":
                tracker.add(100 + number, now_s, 10**which, which % 3)
            elif node is not None and what == "use":
                tracker.observe_request(node, now_s)
                tracker.use(node, now_s)
            elif node is not None and what == "split":
                tracker.split(100 + number, node)
            elif node is not None and what == "remove":
                tracker.remove(node)
        if what == "add" or (what == "split" and node is not None):
            known.append(100 + number)
        elif what == "remove" and node is not None:
            known.remove(node)
        first, second = ([tracker.rate(one) for one in known] for tracker in ranks)
        assert first == second and all(0.0 < rate < math.inf for rate in first)


def test_the_oldest_age_has_no_end() -> None:
    model = ReuseModel()
    history = History(0, 0.0)
    model.begin(history)
    for _ in range(NUM_AGES - 1):
        model.grow(history)
    assert model.rate(history) > 0.0 and history.age == NUM_AGES - 1


def test_a_gap_of_any_length_has_a_class() -> None:
    assert reuse._gap_class(math.inf) == reuse._gap_class(1e308) == reuse.NUM_GAP_CLASSES - 1
