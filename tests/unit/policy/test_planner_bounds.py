"""Plans that end early."""

from __future__ import annotations

import random

from tests.unit.policy.nodes import make_node, random_forest

from sglang_evicpress.core import Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.plan import Plan

MENU = Menu(())


def test_no_search_of_the_whole_tree_moves_more_nodes_than_a_plan_may() -> None:
    menu = Menu((), (Tier.GPU, Tier.HOST))
    costs = CostSnapshot(PrefillCost(0.0, 0.01, 0.0), {Tier.HOST: TransferCost(0.0, 1e4)}, {})
    for seed in range(60):
        draw = random.Random(seed)
        planner = make_planner("evicpress", menu, alpha=1.0, costs=costs)
        planner.add_all(random_forest(draw, menu, 30, tiers=(0, 0, 1)))
        for number in (1, 2, 3):
            plan = planner.plan(Tier.GPU, 120, {Tier.HOST: 40}, most_nodes=number)
            begun = Plan(planner.index, {Tier.HOST: 40})
            begun.free(Tier.GPU, 120, number)
            begun.close()
            assert plan == begun.decisions()


def test_a_plan_of_so_many_nodes_is_the_beginning_of_the_whole_plan() -> None:
    planner = make_planner("lru", MENU, alpha=1.0, costs=CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {}, {}))
    planner.add_all(make_node(i, menu=MENU, tokens=10 if i % 2 else 1000, last_use=i) for i in range(1, 21))
    whole = [decision.node_id for decision in planner.plan(Tier.GPU, 5000)]
    some = [decision.node_id for decision in planner.plan(Tier.GPU, 5000, most_nodes=4)]
    assert some == whole[:4] == [1, 2, 3, 4] and len(whole) > 4
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 500, most_nodes=4)] == [1, 2]
