from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Form, NodeStats, Option
from sglang_evicpress.policy.evicpress import EvicPressPolicy, Point, next_hull_point
from sglang_evicpress.profile import Curves
from sglang_evicpress.utility import PrefillCost

K80, K50, K20 = (Form("keydiff", kept) for kept in (0.8, 0.5, 0.2))
DROP = Option(None, 0)
CURVES = Curves.from_json({"keydiff": {"0.8": 0.98, "0.5": 0.9, "0.2": 0.4}})
PREFILL = PrefillCost(0.0, 1e-3, 0.0)  # a millisecond a token: 1 s for 1,000
POLICY = EvicPressPolicy(1.0, CURVES, PREFILL)


def _node(
    node_id: int,
    parent_id: int | None = None,
    *,
    tokens: int = 1000,
    form: Form = EXACT,
    weight: float = 1.0,
    last_use: int = 0,
    children: int = 0,
) -> NodeStats:
    """A node that can go to any smaller keydiff form or be dropped."""
    slots = int(tokens * form.kept_fraction)
    forms = [other for other in (K80, K50, K20) if other.kept_fraction < form.kept_fraction]
    options = (*(Option(other, int(tokens * other.kept_fraction)) for other in forms), DROP)
    return NodeStats(node_id, parent_id, tokens, slots, 0, form, weight, last_use, children, options)


def _taken(nodes: list[NodeStats], demand: int) -> list[tuple[int, str]]:
    plan = POLICY.plan(nodes, demand)
    return [(decision.node_id, str(decision.option.form or "drop")) for decision in plan]


# --- hulls


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], None),
        ([(100, 9), (120, 9)], None),  # nothing holds fewer slots
        ([(80, 9), (50, 7), (0, 0)], 80),
        ([(80, 5), (50, 8), (0, 0)], 50),  # 80 is dominated
        ([(80, 7), (50, 8), (0, 5)], 50),
        ([(80, 8), (50, 7), (0, 6)], 0),  # 80 and 50 lie below the line from 100 to 0
        ([(75, 9), (50, 8), (0, 6)], 75),  # on one line: the nearest
        ([(80, 10), (50, 10), (0, 0)], 50),  # losing nothing: the smallest
        ([(80, 12), (50, 11), (0, 0)], 80),  # gaining: the best
        ([(80, 11), (50, 12), (0, 0)], 50),
    ],
)
def test_the_next_hull_point(points: list[tuple[int, int]], expected: int | None) -> None:
    found = next_hull_point(Point(100, 10), [Point(*point) for point in points])
    assert (found.num_slots if found else None) == expected


def test_of_equal_points_the_first_given_counts() -> None:
    points = [Point(50, 8.0, Option(Form(press, 0.5), 50)) for press in ("snapkv", "keydiff")]
    assert next_hull_point(Point(100, 10.0), points) is points[0]
    assert next_hull_point(Point(100, 8.0), points) is points[0]


def _upper_hull(start: Point, points: list[Point]) -> list[Point]:
    """Brute force: what no other point dominates and no pair of others has above itself, from the right."""
    states = {start, *(point for point in points if point.num_slots < start.num_slots)}
    useful = {p for p in states if not any(q.num_slots <= p.num_slots and q.utility >= p.utility for q in states - {p})}
    pairs = list(itertools.product(useful, repeat=2))
    return sorted((p for p in useful if not any(_is_above(a, b, p) for a, b in pairs)), reverse=True)


def _is_above(left: Point, right: Point, point: Point) -> bool:
    if not left.num_slots < point.num_slots < right.num_slots:
        return False
    rise = (right.utility - left.utility) * (point.num_slots - left.num_slots)
    return (point.utility - left.utility) * (right.num_slots - left.num_slots) < rise


small_points = st.builds(Point, st.integers(0, 25), st.integers(0, 25).map(float), st.none())


@settings(max_examples=300)
@given(small_points, st.lists(small_points, max_size=9))
def test_walking_visits_the_upper_convex_hull(start: Point, points: list[Point]) -> None:
    walked = [start]
    while (found := next_hull_point(walked[-1], points)) is not None:
        walked.append(found)
    hull = _upper_hull(start, points)
    assert walked == (hull if hull[0] == start else [start, *hull])


# --- plans by hand


def test_a_cold_node_is_dropped_and_a_hot_one_compressed() -> None:
    # cold: drop loses 0.05 * 1 s over 1000 slots, 0.00005 a slot; hot: 0.02 over 200, 0.0001 a slot
    nodes = [_node(1, weight=0.05), _node(2, weight=1.0)]
    assert _taken(nodes, 1000) == [(1, "drop")]
    assert _taken(nodes, 1001) == [(1, "drop"), (2, "keydiff@0.8")]


def test_a_node_that_takes_several_steps_is_decided_once() -> None:
    assert _taken([_node(1)], 200) == [(1, "keydiff@0.8")]
    assert _taken([_node(1)], 201) == [(1, "keydiff@0.5")]
    assert _taken([_node(1)], 501) == [(1, "keydiff@0.2")]
    assert _taken([_node(1)], 801) == [(1, "drop")]


def test_a_hot_shared_prefix_shrinks_under_its_children() -> None:
    nodes = [_node(1, weight=1.0, children=2), _node(2, 1, weight=100.0), _node(3, 1, weight=100.0)]
    assert _taken(nodes, 200) == [(1, "keydiff@0.8")]


def test_a_parent_is_dropped_only_after_its_last_child() -> None:
    nodes = [_node(1, weight=0.0, children=2), _node(2, 1, weight=0.001), _node(3, 1, weight=0.002)]
    assert _taken(nodes, 3000) == [(2, "drop"), (3, "drop"), (1, "drop")]
    unseen_child = [_node(1, weight=0.0, children=3), *nodes[1:]]
    assert (1, "drop") not in _taken(unseen_child, 3000)


def test_a_parent_compressed_before_its_children_went_is_only_dropped() -> None:
    nodes = [_node(1, weight=0.1, children=1), _node(2, 1, weight=0.9)]
    assert _taken(nodes, 500) == [(1, "keydiff@0.5")]
    assert _taken(nodes, 2000) == [(2, "drop"), (1, "drop")]


def test_losing_the_last_child_does_not_put_a_parent_before_its_turn() -> None:
    nodes = [_node(1, weight=0.1, children=1), _node(2, 1, weight=0.001), _node(3, weight=0.15)]
    assert _taken(nodes, 1400) == [(2, "drop"), (1, "keydiff@0.8"), (3, "keydiff@0.8")]


def test_a_lossy_node_that_is_cheap_to_recompute_goes_first_and_gains() -> None:
    nodes = [_node(1, tokens=100, form=K50), _node(2, tokens=1000, weight=1e-6)]
    (decision,) = POLICY.plan(nodes, 10)
    assert (decision.node_id, decision.option) == (1, DROP)
    # quality 0.9 at once against quality 1 after 0.1 s, here equal; recomputing faster, it gains
    assert decision.utility_loss == pytest.approx(0.0)
    (decision,) = EvicPressPolicy(1.0, CURVES, PrefillCost(0.0, 1e-4, 0.0)).plan(nodes, 10)
    assert decision.utility_loss == pytest.approx(-0.09)
    assert decision.reason == "drop: gains 0.09 over 50 slots"


def test_a_node_without_reuse_is_dropped_outright_the_oldest_first() -> None:
    nodes = [_node(1, weight=0.0, last_use=5), _node(2, weight=0.0, last_use=4), _node(3)]
    assert _taken(nodes, 1500) == [(2, "drop"), (1, "drop")]


def test_the_reason_says_what_is_lost_and_what_for() -> None:
    (decision,) = POLICY.plan([_node(1)], 500)
    assert decision.reason == "keydiff@0.5: loses 0.1 over 500 slots"
    assert (decision.freed_slots, decision.utility_loss) == (500, pytest.approx(0.1))


def test_alpha_decides_between_compressing_and_dropping() -> None:
    assert _taken([_node(1)], 500) == [(1, "keydiff@0.5")]
    (decision,) = EvicPressPolicy(100.0, CURVES, PREFILL).plan([_node(1)], 500)
    assert decision.option == DROP


def test_a_node_of_holes_only_is_dropped_when_its_parent_needs_it_and_not_before() -> None:
    hollow = NodeStats(2, 1, 10, 0, 1000, K20, 5.0, 0, 0, (DROP,))
    nodes = [_node(1, children=1), hollow]
    assert _taken(nodes, 800) == [(1, "keydiff@0.2")]
    assert _taken(nodes, 801) == [(2, "drop"), (1, "drop")]
    other_child = _node(1, children=2)
    assert _taken([other_child, hollow], 801) == [(1, "keydiff@0.2")]


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf])
def test_a_bad_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha is {alpha}"):
        EvicPressPolicy(alpha, CURVES, PREFILL)


# --- how good the greedy is


@st.composite
def _flat(draw: st.DrawFn) -> tuple[EvicPressPolicy, list[NodeStats], int]:
    curves = Curves.from_json(
        {
            press: {kept: draw(st.floats(0.0, 1.0)) for kept in ("0.75", "0.5", "0.25")}
            for press in ("keydiff", "snapkv")
        }
    )
    prefill = PrefillCost(draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 0.1)), draw(st.floats(0.0, 1e-3)))
    forms = [Form(press, kept) for press in ("keydiff", "snapkv") for kept in (0.75, 0.5, 0.25)]
    nodes = []
    for node_id in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(1, 40))
        options = [
            Option(form, draw(st.integers(0, tokens - 1)))
            for form in draw(st.lists(st.sampled_from(forms), unique=True, max_size=4))
        ]
        options += [DROP] * draw(st.sampled_from((1, 1, 0)))
        form = draw(st.sampled_from((EXACT, *forms)))
        depth, weight = draw(st.integers(0, 100)), draw(st.floats(0.0, 10.0))
        nodes.append(NodeStats(node_id, None, tokens, tokens, depth, form, weight, 0, 0, tuple(options)))
    policy = EvicPressPolicy(draw(st.floats(0.0, 5.0)), curves, prefill)
    return policy, nodes, draw(st.integers(1, 100))


def _states(policy: EvicPressPolicy, node: NodeStats) -> list[tuple[int, float]]:
    """(slots, utility) of the node as it is, then of every option, from the formulas of the paper."""
    states = [(node.num_slots, node.weight * policy.alpha * policy.curves.quality(node.form))]
    n, cost = node.num_tokens, policy.prefill
    for option in node.options:
        if option.form is None:
            wait = cost.fixed_s + cost.per_token_s * n + cost.per_token_depth_s * n * (node.depth_tokens + n / 2)
            states.append((0, node.weight * (policy.alpha - wait)))
        else:
            states.append((option.num_slots, node.weight * policy.alpha * policy.curves.quality(option.form)))
    return states


@settings(max_examples=150, deadline=None)
@given(_flat())
def test_the_loss_is_within_one_item_of_the_optimum(
    instance: tuple[EvicPressPolicy, list[NodeStats], int],
) -> None:
    policy, nodes, demand = instance
    plan = policy.plan(nodes, demand)
    states = [_states(policy, node) for node in nodes]
    start_slots = sum(node.num_slots for node in nodes)
    start_utility = sum(of_node[0][1] for of_node in states)
    losses = [
        start_utility - sum(utility for _, utility in choice)
        for choice in itertools.product(*states)
        if start_slots - sum(slots for slots, _ in choice) >= demand
    ]
    freed = sum(decision.freed_slots for decision in plan)
    assert bool(losses) == (freed >= demand)
    if not losses:
        return
    assert freed - plan[-1].freed_slots < demand

    loss = sum(decision.utility_loss for decision in plan)
    final = {node.id: of_node[0] for node, of_node in zip(nodes, states, strict=True)}
    for decision in plan:
        final[decision.node_id] = next(
            state
            for option, state in zip(nodes[decision.node_id].options, states[decision.node_id][1:], strict=True)
            if option == decision.option
        )
    assert loss == pytest.approx(start_utility - sum(utility for _, utility in final.values()), abs=1e-9)

    # A demand may be met before all moves that gain are made; the optimum makes them, the plan need not.
    gains_left = sum(
        max([utility - final[node.id][1] for slots, utility in of_node if slots < final[node.id][0]] + [0.0])
        for node, of_node in zip(nodes, states, strict=True)
    )
    last = plan[-1].node_id
    last_item = max(utility for slots, utility in states[last] if slots >= final[last][0]) - final[last][1]
    assert min(losses) - 1e-9 <= loss <= min(losses) + last_item + gains_left + 1e-9
