"""Plans that end early."""

from __future__ import annotations

from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.policy.menu import Menu

MENU = Menu(())


def test_a_plan_of_so_many_nodes_is_the_beginning_of_the_whole_plan() -> None:
    planner = make_planner("lru", MENU, alpha=1.0, costs=CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {}, {}))
    planner.add_all(make_node(i, menu=MENU, tokens=10 if i % 2 else 1000, last_use=i) for i in range(1, 21))
    whole = [decision.node_id for decision in planner.plan(Tier.GPU, 5000)]
    some = [decision.node_id for decision in planner.plan(Tier.GPU, 5000, most_nodes=4)]
    assert some == whole[:4] == [1, 2, 3, 4] and len(whole) > 4
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 500, most_nodes=4)] == [1, 2]
