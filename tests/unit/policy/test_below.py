"""Nodes below the GPU, of which nothing else can be made where they are: every policy on every tier."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import NAMES, assert_closed, each_policy, execute, make_node, random_forest

from sglang_evicpress.core import NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner, policy_info
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.promotion import Budget

TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
MENU = Menu(tuple(form for name in NAMES for form in policy_info(name).forms), TIERS)
COSTS = CostSnapshot(
    PrefillCost(0.0, 1.0, 1e-6), {Tier.HOST: TransferCost(1e-3, 1e4), Tier.SSD: TransferCost(1e-2, 1e3)}, {}
)


def _policy(name: str, *nodes: NodeStats) -> Planner:
    curve = [form.kept_fraction for form in MENU.forms]
    planner = make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=curve, next_use={})
    planner.add_all(nodes)
    return planner


@each_policy
def test_nodes_go_down_tier_by_tier_and_then_away(name: str) -> None:
    """One node per tier, full below: each pushes the next one on."""
    nodes = [replace(make_node(int(tier), menu=MENU, tier=tier, last_use=9 - tier), allowed_forms=0) for tier in TIERS]
    plan = _policy(name, *nodes).plan(Tier.GPU, 100)
    moves = [(decision.node_id, str(decision.option)) for decision in plan]
    assert moves == [(2, "drop"), (1, "exact/ssd"), (0, "exact/host")]


@each_policy
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_a_lower_tier_is_relieved_by_itself(name: str, tier: Tier) -> None:
    nodes = [replace(make_node(i, menu=MENU, tier=tier, last_use=i), allowed_forms=0) for i in range(4)]
    room = {Tier.SSD: 1000} if tier == Tier.HOST else {}
    plan = _policy(name, *nodes[:3], replace(nodes[3], is_locked=True)).plan(tier, 250, room)
    assert {decision.node_id for decision in plan} == {0, 1, 2}
    assert {str(decision.option) for decision in plan} == {"exact/ssd" if room else "drop"}
    if name in ("lru", "keydiff@0.5+lru", "impress@0.1"):
        assert [decision.node_id for decision in plan] == [0, 1, 2]


@each_policy
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_form_changes_below_the_gpu(name: str, seed: int) -> None:
    draw = random.Random(seed)
    forest = random_forest(draw, MENU, draw.randint(1, 20), tiers=(0, 1, 2), empty=0.15, locked=0.1)
    nodes = [node if node.tier == Tier.GPU else replace(node, allowed_forms=0) for node in forest]
    planner = _policy(name, *nodes)
    held = list(planner.index.num_bytes)
    tier = draw.choice(TIERS)
    room = {lower: draw.choice((0, draw.randint(0, 200))) for lower in TIERS if lower > tier}
    demand = draw.randint(1, 1 + held[tier])
    plan = planner.plan(tier, demand, room)
    for node in nodes:
        told = planner.explain(node.id)
        assert node.is_locked or told["next"] is not None or told["why"]
    for decision in plan:
        if decision.source.tier != Tier.GPU and not decision.option.is_drop:
            assert (decision.option.form, decision.option.num_bytes) == (
                decision.source.form,
                decision.source.num_bytes,
            )
        execute(planner, [decision])
        for lower, free in room.items():
            assert planner.index.num_bytes[lower] <= held[lower] + free
        assert_closed(planner)
    movable = sum(node.num_bytes for node in nodes if node.tier == tier and not node.is_locked)
    assert held[tier] - planner.index.num_bytes[tier] >= min(demand, movable)


def test_a_node_below_is_explained_and_brought_up_as_it_is() -> None:
    half = MENU.forms[1]
    node = replace(make_node(1, menu=MENU, tier=Tier.SSD, form=half), allowed_forms=0)
    planner = _policy("evicpress", node)
    rows = planner.explain(1)["options"]
    assert isinstance(rows, list) and [row["option"] for row in rows] == [f"{half}/ssd", "drop"]
    (decision,) = planner.plan_promotions({Tier.GPU: 1000}, Budget(10**9, 1e9))
    assert (str(decision.option), decision.option.num_bytes) == (f"{half}/gpu", node.num_bytes)


@each_policy
def test_nodes_of_holes_below_go_only_for_what_is_above_them(name: str) -> None:
    """A chain on the host whose lower two hold nothing; another node is enough, then all have to go."""
    hollow = [
        replace(make_node(i, i - 1, menu=MENU, depth=100 * i, tier=Tier.HOST), num_bytes=0, allowed_forms=0)
        for i in (2, 3)
    ]
    top = replace(make_node(1, menu=MENU, tier=Tier.HOST, last_use=9, hits=99, weight=99.0), allowed_forms=0)
    other = replace(make_node(4, menu=MENU, tier=Tier.HOST, tokens=101), allowed_forms=0)
    planner = _policy(name, top, *hollow, other)
    assert planner.plan(Tier.HOST, 1) != []
    if name != "belady":  # to which all are alike, and the smaller id goes first
        assert [decision.node_id for decision in planner.plan(Tier.HOST, 1)] == [4]
    everything = [decision.node_id for decision in planner.plan(Tier.HOST, 201)]
    assert sorted(everything) == [1, 2, 3, 4] and everything.index(3) < everything.index(2) < everything.index(1)


def test_a_node_of_holes_stays_where_what_is_above_it_only_shrinks() -> None:
    top = make_node(1, menu=MENU, last_use=9)
    hollow = replace(make_node(2, 1, menu=MENU, depth=100), num_bytes=0, allowed_forms=0)
    other = replace(make_node(3, menu=MENU, last_use=1), allowed_forms=0)
    plan = _policy("keydiff@0.5+lru", top, hollow, other).plan(Tier.GPU, 60)
    assert [(decision.node_id, str(decision.option)) for decision in plan] == [(3, "drop"), (1, "keydiff@0.5/gpu")]
