"""Hulls: against an independent reference, and one by one against many at once."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import random_forest

from sglang_evicpress.core import Form, LowerCopy, Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.hull import Point, next_on_hull, upper_hull
from sglang_evicpress.policy.index import NodeIndex
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], None),
        ([(100, 9.0), (120, 9.0)], None),  # nothing has fewer bytes
        ([(80, 9.0), (50, 7.0), (0, 0.0)], 80),
        ([(80, 5.0), (50, 8.0), (0, 0.0)], 50),  # 80 is dominated
        ([(80, 8.0), (50, 7.0), (0, 6.0)], 0),  # 80 and 50 lie below the line from 100 to 0
        ([(75, 9.0), (50, 8.0), (0, 6.0)], 75),  # on one line: the nearest
        ([(80, 12.0), (50, 11.0), (0, 0.0)], 80),  # gaining: the best per byte
    ],
)
def test_the_next_point_by_hand(points: list[tuple[int, float]], expected: int | None) -> None:
    found = next_on_hull((100, 10.0, -1), [(size, worth, 0) for size, worth in points])
    assert (found[0] if found else None) == expected


def test_of_equal_points_the_first_given_counts() -> None:
    assert next_on_hull((100, 10.0, -1), [(50, 8.0, 1), (50, 8.0, 2)]) == (50, 8.0, 1)


def _reference(start: Point, points: list[Point]) -> set[tuple[int, float]]:
    """Points on or above every line between two of the others, to the left of ``start``, by the definition."""
    tops: dict[int, float] = {}
    for size, worth, _ in points:
        if size < start[0]:
            tops[size] = max(worth, tops.get(size, worth))
    states = [*tops.items(), (start[0], start[1])]

    def is_below(state: tuple[int, float]) -> bool:
        for left, right in itertools.permutations(states, 2):
            if left[0] < state[0] < right[0]:
                share = Fraction(state[0] - left[0], right[0] - left[0])
                if Fraction(state[1]) < (1 - share) * Fraction(left[1]) + share * Fraction(right[1]):
                    return True
        return False

    return {state for state in states if not is_below(state)}


small = st.tuples(st.integers(0, 24), st.integers(-20, 20).map(float), st.just(0))


@settings(max_examples=200, deadline=None)
@given(start=small, points=st.lists(small, max_size=8))
def test_the_hull_is_what_no_line_between_others_is_above(start: Point, points: list[Point]) -> None:
    hull = upper_hull([start, *points])
    assert {(size, worth) for size, worth, _ in hull} == _reference(start, points)
    slopes = [(a[1] - b[1]) / (a[0] - b[0]) for a, b in itertools.pairwise(hull)]
    assert slopes == sorted(slopes) or all(x <= y + 1e-12 for x, y in itertools.pairwise(slopes))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from((1, 4, 16)),
    num_forms=st.integers(0, 6),
    alpha=st.sampled_from((0.0, 0.3, 1.0, 7.0)),
)
@example(seed=3091015, page_size=16, num_forms=3, alpha=0.0)  # pages make a form larger than the one before it
def test_many_at_once_are_bit_for_bit_what_one_by_one_are(
    seed: int, page_size: int, num_forms: int, alpha: float
) -> None:
    forms = [Form(press, kept) for press in ("keydiff", "snapkv") for kept in (0.75, 1 / 3, 0.1)]
    coded = Form(None, 1.0, "int8")
    menu = Menu((*forms[:num_forms], coded), tuple(Tier)[:3], 3, page_size, {"raw": 1.0, "int8": 0.53})
    costs = CostSnapshot(
        PrefillCost(0.01, 1e-3, 1e-6),
        {Tier.HOST: TransferCost(1e-3, 1e4), Tier.SSD: TransferCost(1e-2, 1e3)},
        {"int8": TransferCost(1e-4, 3e4)},
    )
    policy = EvicPressPolicy(menu, alpha, costs)
    index = NodeIndex(policy)
    draw = random.Random(seed)
    for node in random_forest(draw, menu, draw.randint(1, 30), tiers=(0, 1, 2), tokens=(1, 300)):
        tiers = [tier for tier in (Tier.HOST, Tier.SSD) if draw.random() < 0.4]  # also where it is, or above that
        lower_copies = [LowerCopy(tier, draw.choice(menu.forms), draw.randint(0, 900), draw.random()) for tier in tiers]
        index.add(replace(node, lower_copies=lower_copies))
    candidates = list(index.candidates.values())
    for candidate in candidates:
        candidate.memo = None
    alone = [policy.step(candidate) for candidate in candidates]
    for candidate in candidates:
        candidate.memo = None
    policy.prepare(candidates)
    assert [policy.step(candidate) for candidate in candidates] == alone
