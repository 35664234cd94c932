from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policy.nodes import execute, make_node, random_forest

from sglang_evicpress.core import EXACT, Form, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.base import DROPPED
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.promotion import Budget
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

HALF = Form("keydiff", 0.5)
MENU = Menu((HALF,), tuple(Tier)[:3])
COSTS = CostSnapshot(
    PrefillCost(0.0, 0.1, 0.0), {Tier.HOST: TransferCost(0.0, 1e3), Tier.SSD: TransferCost(0.0, 1e2)}, {}
)
PLENTY = Budget(10**9, 1e9)
LOSSY = (1.0, 0.6)


def planner_of(*nodes: NodeStats, alpha: float = 1.0) -> Planner:
    planner = make_planner("evicpress", MENU, alpha=alpha, costs=COSTS)
    planner.add_all(nodes)
    return planner


def total_utility(planner: Planner) -> float:
    policy = planner.policy
    assert isinstance(policy, EvicPressPolicy)
    return sum(
        candidate.weight * (policy.alpha * candidate.quality - policy.delay_s(candidate))
        for candidate in planner.index.candidates.values()
    )


def test_a_node_below_is_promoted_when_there_is_room() -> None:
    planner = planner_of(make_node(1, menu=MENU, tier=Tier.HOST))
    (decision,) = planner.plan_promotions({Tier.GPU: 100}, PLENTY)
    assert (decision.option.tier, decision.option.form, decision.loss) == (Tier.GPU, EXACT, pytest.approx(-0.1))
    assert planner.plan_promotions({Tier.GPU: 99}, PLENTY) == []


def test_an_exact_copy_below_upgrades_a_lossy_node_when_there_is_room() -> None:
    lossy = replace(make_node(1, menu=MENU, form=HALF, curve=LOSSY), exact_on=Tier.SSD)
    (decision,) = planner_of(lossy).plan_promotions({Tier.GPU: 50}, PLENTY)
    assert (str(decision.option), decision.option.num_bytes) == ("exact/gpu", 100)
    assert decision.loss == pytest.approx(-0.4)
    assert planner_of(lossy).plan_promotions({Tier.GPU: 49}, PLENTY) == []
    assert planner_of(replace(lossy, exact_on=None)).plan_promotions({Tier.GPU: 50}, PLENTY) == []


def test_an_exchange_is_made_only_if_more_is_gained_than_lost() -> None:
    cold = make_node(1, menu=MENU, weight=1.0, curve=(1.0, 0.0))
    for weight, pays in ((5.0, True), (0.5, False)):
        hot = make_node(2, menu=MENU, tier=Tier.HOST, weight=weight, curve=(1.0, 0.0))
        planner = planner_of(cold, hot)
        before = total_utility(planner)
        decisions = planner.plan_promotions({Tier.HOST: 100}, PLENTY)
        assert [str(decision.option) for decision in decisions] == (["exact/host", "exact/gpu"] if pays else [])
        execute(planner, decisions)
        assert total_utility(planner) == pytest.approx(before + (0.4 if pays else 0.0))


def test_a_curve_that_turned_out_flat_shrinks_a_node_on_a_slow_tier() -> None:
    planner = planner_of(make_node(1, menu=MENU, tier=Tier.SSD, curve=(1.0, 0.0)))
    assert planner.plan_promotions({}, PLENTY) == []
    planner.add(make_node(1, menu=MENU, tier=Tier.SSD, curve=(1.0, 0.99)))
    (decision,) = planner.plan_promotions({}, PLENTY)
    assert str(decision.option) == "keydiff@0.5/ssd"
    assert decision.loss == pytest.approx(-(0.5 - 0.01))


@pytest.mark.parametrize("budget", [Budget(99, 1e9), Budget(10**9, 0.09)])
def test_nothing_is_moved_beyond_the_budget(budget: Budget) -> None:
    planner = planner_of(make_node(1, menu=MENU, tier=Tier.HOST))
    assert planner.plan_promotions({Tier.GPU: 1000}, budget) == []


def test_the_best_per_byte_comes_first_when_the_budget_is_for_one() -> None:
    nodes = [make_node(number, menu=MENU, tier=Tier.HOST, weight=float(number)) for number in (1, 3, 2)]
    (decision,) = planner_of(*nodes).plan_promotions({Tier.GPU: 1000}, Budget(150, 1e9))
    assert decision.node_id == 3


def test_a_policy_without_utility_rearranges_nothing() -> None:
    planner = make_planner("lru", MENU, alpha=1.0, costs=COSTS)
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST))
    assert planner.plan_promotions({Tier.GPU: 1000}, PLENTY) == []


def test_what_would_be_the_next_to_leave_stays_where_it_is() -> None:
    # 900 bytes are free. Per byte, at a second per 1000 bytes from the host, what is lost is the weight.
    large = make_node(1, menu=MENU, tier=Tier.HOST, tokens=1000, weight=1.0, curve=(1.0, 0.0))
    small = make_node(2, menu=MENU, tokens=100, weight=2.0, curve=(1.0, 0.0))
    assert planner_of(large, small).plan_promotions({Tier.GPU: 1000}, PLENTY) == []
    assert planner_of(large, replace(small, weight=1.0)).plan_promotions({Tier.GPU: 1000}, PLENTY) == []
    (decision,) = planner_of(large, replace(small, weight=0.9)).plan_promotions({Tier.GPU: 1000}, PLENTY)
    assert (decision.node_id, str(decision.option)) == (1, "exact/gpu")
    # Nor is a node made exact that would be the first to shrink again: it gains 0.6 per 1000 bytes.
    lossy = replace(make_node(3, menu=MENU, form=HALF, curve=(1.0, 0.97)), exact_on=Tier.SSD)
    for weight, options in ((0.7, []), (0.5, ["exact/gpu"])):
        planner = planner_of(lossy, make_node(4, menu=MENU, weight=weight, curve=(1.0, 0.0)))
        assert [str(decision.option) for decision in planner.plan_promotions({Tier.GPU: 1000}, PLENTY)] == options


def test_what_a_plan_has_taken_is_not_brought_back() -> None:
    nodes = [make_node(i, menu=MENU, tokens=100 * i, weight=float(10 - i), curve=(1.0, 0.0)) for i in range(1, 9)]
    planner = planner_of(*nodes)
    plan = planner.plan(Tier.GPU, 1500, {Tier.HOST: 10_000})
    execute(planner, plan)
    assert [(decision.node_id, str(decision.option)) for decision in plan] == [(8, "exact/host"), (7, "exact/host")]
    room = {Tier.GPU: 10_000, Tier.HOST: 10_000}
    assert planner.plan_promotions(room, PLENTY) == []
    back = plan[-1].node_id
    planner.touch(back, 50.0, 9, 9)
    assert [decision.node_id for decision in planner.plan_promotions(room, PLENTY)] == [back]


def test_room_that_fells_what_is_worth_more_is_not_made() -> None:
    # The node on the GPU is larger than the host, and its child keeps it from the SSD: it could only be dropped.
    parent = make_node(1, menu=MENU, tokens=500, curve=(1.0, 0.0))
    child = make_node(2, 1, menu=MENU, tokens=50, depth=500, tier=Tier.HOST, curve=(1.0, 0.0))
    hot = make_node(3, menu=MENU, tier=Tier.HOST, weight=2.0, curve=(1.0, 0.0))
    planner = planner_of(*(replace(node, allowed_forms=0) for node in (parent, child, hot)))
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 100)] == [2, 1]
    assert sum(decision.loss for decision in planner.plan(Tier.GPU, 100)) == pytest.approx(50.0 + 5.0 - 0.05)
    assert planner.plan_promotions({}, PLENTY) == []


def test_only_so_many_candidates_are_looked_at() -> None:
    nodes = [make_node(number, menu=MENU, tier=Tier.HOST, weight=float(number)) for number in range(1, 9)]
    decisions = planner_of(*nodes).plan_promotions({Tier.GPU: 1000}, replace(PLENTY, num_options=3))
    assert [decision.node_id for decision in decisions] == [8, 7, 6]


def test_an_upgrade_takes_the_time_of_the_tier_of_the_exact_copy() -> None:
    for tier in (Tier.GPU, Tier.HOST):
        lossy = replace(make_node(1, menu=MENU, tier=tier, form=HALF, curve=LOSSY, weight=9.0), exact_on=Tier.SSD)
        planner, upgrade_s = planner_of(lossy), COSTS.load_seconds(Tier.SSD, 100)
        (decision,) = planner.plan_promotions({tier: 50}, Budget(10**9, upgrade_s))
        assert str(decision.option) == f"exact/{tier.label}"
        assert planner.plan_promotions({tier: 50}, Budget(10**9, upgrade_s * 0.99)) == []
    same = replace(make_node(1, menu=MENU, tier=Tier.SSD, form=HALF, curve=LOSSY), exact_on=Tier.SSD)
    assert [str(one.option) for one in planner_of(same).plan_promotions({Tier.SSD: 50}, PLENTY)] == []


@given(st.data())
def test_utility_rises_capacities_hold_and_tiers_stay_prefix_closed(data: st.DataObject) -> None:
    nodes: list[NodeStats] = []
    for node_id in range(1, data.draw(st.integers(1, 12)) + 1):
        parent = data.draw(st.sampled_from([None, *nodes]))
        on_tier = data.draw(st.integers(0 if parent is None else int(parent.tier), 2))
        form = data.draw(st.sampled_from(MENU.forms))
        curve = (1.0, data.draw(st.floats(0.0, 1.0)))
        node = make_node(
            node_id,
            None if parent is None else parent.id,
            menu=MENU,
            tokens=data.draw(st.integers(1, 100)),
            tier=Tier(on_tier),
            form=form,
            curve=curve,
            weight=data.draw(st.floats(0.0, 10.0)),
            is_locked=parent is not None and parent.is_locked and data.draw(st.booleans()),
        )
        nodes.append(replace(node, exact_on=Tier.SSD) if not form.is_exact and data.draw(st.booleans()) else node)
    alpha = data.draw(st.floats(0.0, 10.0))
    planner = planner_of(*nodes, alpha=alpha)
    room = {tier: data.draw(st.integers(0, 150)) for tier in MENU.tiers}
    capacity = [planner.index.num_bytes[tier] + room[tier] for tier in MENU.tiers]
    before = total_utility(planner)
    decisions = planner.plan_promotions(room, PLENTY)
    for decision in decisions:
        execute(planner, [decision])
        assert all(planner.index.num_bytes[tier] <= capacity[tier] for tier in MENU.tiers)
        for candidate in planner.index.candidates.values():
            parent_candidate = planner.index.candidates.get(candidate.parent_id or 0)
            assert parent_candidate is None or parent_candidate.tier <= candidate.tier < DROPPED
    assert len({decision.node_id for decision in decisions}) == len(decisions)
    gained = -sum(decision.loss for decision in decisions)
    assert gained >= -1e-9
    dropped = sum(
        decision.weight * (decision.quality * alpha - decision.delay_s)
        for decision in decisions
        if decision.option.is_drop
    )
    assert total_utility(planner) + dropped == pytest.approx(before + gained, abs=1e-6)


@given(seed=st.integers(0, 2**32), slice_nodes=st.integers(1, 50))
def test_a_search_in_slices_finds_what_one_at_once_finds(seed: int, slice_nodes: int) -> None:
    draw = random.Random(seed)
    nodes = [replace(node, exact_on=None if node.form.is_exact else Tier.SSD) for node in random_forest(draw, MENU, 60)]
    planner, room, budget = planner_of(*nodes), {Tier.GPU: 300, Tier.HOST: 50}, Budget(500, 1e9, 8)
    search = planner.search_promotions(budget.num_options)
    assert search is not None
    num_looks = 1
    while search.look(slice_nodes):
        num_looks += 1
    assert num_looks == -(-len(nodes) // slice_nodes)
    assert search.plan(room, budget) == planner.plan_promotions(room, budget)


def test_a_search_passes_over_what_has_gone_or_changed_since() -> None:
    nodes = [make_node(i, menu=MENU, tier=Tier.HOST, weight=float(i)) for i in (1, 2, 3)]
    planner = planner_of(*nodes)
    search = planner.search_promotions()
    assert search is not None and not search.look(3)
    planner.remove(1)
    planner.add(replace(nodes[1], tier=Tier.GPU))
    assert [decision.node_id for decision in search.plan({Tier.GPU: 1000}, PLENTY)] == [3]
