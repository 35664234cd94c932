"""Forms for nodes that are written anew where they lie, and forms in which nodes arrive where room is scarce."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.policy.nodes import execute, make_node, random_forest

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu

HALF, INT4 = Form("keydiff", 0.5), Form(codec="int4")
MENU = Menu((HALF, INT4), (Tier.GPU, Tier.HOST, Tier.SSD), slot_bytes=16)
COSTS = CostSnapshot(
    PrefillCost(0.0, 1.0, 0.0), {Tier.HOST: TransferCost(0.0, 1e6), Tier.SSD: TransferCost(0.0, 1e4)}, {}
)
CURVE = (1.0, 0.9, 0.98)  # exact, keydiff@0.5, exact+int4
PLENTY = 10**9


def planner_of(*nodes: object, alpha: float = 1.0, name: str = "evicpress") -> Planner:
    planner = make_planner(name, MENU, alpha=alpha, costs=COSTS)
    planner.add_all(nodes)
    return planner


def node(
    node_id: int, tier: Tier, *, tokens: int = 64, weight: float = 1.0, curve: tuple[float, ...] = CURVE
) -> object:
    return make_node(node_id, menu=MENU, tokens=tokens, tier=tier, weight=weight, curve=curve)


@pytest.mark.parametrize(("alpha", "form"), [(0.1, INT4), (3.0, INT4), (4.0, None)])
def test_a_node_is_rewritten_in_the_form_that_is_read_sooner_than_its_quality_is_worth(
    alpha: float, form: Form | None
) -> None:
    exact = node(1, Tier.SSD)  # 1,024 bytes are read in 0.1024 s, 320 in 0.032 s: 0.0704 s for a loss of 0.02
    decisions = planner_of(exact, alpha=alpha).plan_rewrites([exact], Tier.SSD, PLENTY)
    assert [decision.option.form for decision in decisions] == ([] if form is None else [form])
    for decision in decisions:
        assert decision.source.tier == decision.option.tier == Tier.SSD and decision.freed_bytes == 704
        assert decision.loss == pytest.approx(alpha * 0.02 - 0.0704)


def test_where_room_is_scarce_its_bytes_count_as_what_would_be_lost_for_them() -> None:
    exact, other = node(1, Tier.SSD), node(2, Tier.SSD, weight=0.01, curve=(1.0, 0.0, 0.0))
    planner = planner_of(exact, other, alpha=4.0)
    assert planner.plan_rewrites([exact], Tier.SSD, PLENTY) == []
    (decision,) = planner.plan_rewrites([exact], Tier.SSD, 0)
    now, then = (4.0 * quality - seconds for quality, seconds in ((1.0, 0.1024), (decision.quality, decision.delay_s)))
    assert decision.loss == pytest.approx(now - then) and decision.loss > 0.0, "the utility given up, not the price"


def test_those_that_gain_most_come_first_and_locked_ones_and_few_bytes_never() -> None:
    nodes = [node(index, Tier.SSD, weight=weight) for index, weight in enumerate((1.0, 3.0, 2.0))]
    locked = replace(node(7, Tier.SSD, weight=9.0), is_locked=True)
    decisions = planner_of(*nodes, locked).plan_rewrites([*nodes, locked], Tier.SSD, PLENTY)
    assert [decision.node_id for decision in decisions] == [1, 2, 0]
    assert planner_of(*nodes, name="lru").plan_rewrites(nodes, Tier.SSD, PLENTY) == []


def arrives_as(host_room: int, weight: float, other_weight: float) -> Form | None:
    """The form in which a node leaves the GPU, where the host has another node."""
    leaving, other = node(1, Tier.GPU, weight=weight), node(2, Tier.HOST, tokens=1024, weight=other_weight)
    planner = planner_of(leaving, other, alpha=1.0)
    decisions = planner.plan(Tier.GPU, 1024, {Tier.HOST: host_room, Tier.SSD: PLENTY})
    (moved,) = (decision for decision in decisions if decision.node_id == 1)
    assert moved.option.tier == Tier.HOST
    return moved.option.form


def test_a_node_arrives_in_the_form_of_which_the_bytes_pay_where_they_are_scarce() -> None:
    assert arrives_as(PLENTY, 1.0, 100.0) == EXACT, "bytes cost nothing"
    assert arrives_as(1025, 1.0, 1e-9) == EXACT, "the other node gives them up for nothing"
    assert arrives_as(1025, 1.0, 100.0) == INT4, "what they cost the other is more than they are worth to it"
    assert arrives_as(1025, 1e6, 100.0) == EXACT


@pytest.mark.parametrize("seed", range(20))
def test_pricing_room_frees_as_much_within_every_tier(seed: int) -> None:
    draw = random.Random(seed)
    planner = planner_of(*random_forest(draw, MENU, 60))
    room = {Tier.HOST: draw.randrange(2000), Tier.SSD: draw.randrange(2000)}
    wanted = draw.randrange(1, 8000)
    before = [planner.index.num_bytes[tier] for tier in Tier]
    decisions = planner.plan(Tier.GPU, wanted, room)
    execute(planner, decisions)
    after = [planner.index.num_bytes[tier] for tier in Tier]
    movable = before[Tier.GPU] - planner.index.locked_bytes[Tier.GPU]
    assert before[Tier.GPU] - after[Tier.GPU] >= min(wanted, movable)
    assert all(after[tier] <= before[tier] + room[tier] for tier in (Tier.HOST, Tier.SSD))
