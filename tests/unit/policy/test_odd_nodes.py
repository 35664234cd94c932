"""Nodes as no well-behaved caller hands them over: children before their parents, weights that have all but faded."""

from __future__ import annotations

import math
import random

import pytest
from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner

MENU = Menu((Form("keydiff", 0.5),), (Tier.GPU, Tier.HOST))
COSTS = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {Tier.HOST: TransferCost(0.0, 10.0)}, {})


def a_policy(name: str) -> Planner:
    return make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=(1.0, 0.8))


def chain(length: int, weight: float = 1.0) -> list[NodeStats]:
    """Nodes of 10 tokens, each below the one before, the deeper the more recently used."""
    return [
        make_node(
            i, i - 1 if i else None, menu=MENU, tokens=10, depth=10 * i, weight=weight, last_use=i, curve=(1.0, 0.8)
        )
        for i in range(length)
    ]


@pytest.mark.parametrize("name", ["evicpress", "lru", "tlru", "gdsf", "adaptcache", "keydiff@0.5+lru"])
def test_all_nodes_at_once_may_come_in_any_order(name: str) -> None:
    nodes = chain(6)
    known = a_policy(name)
    known.add_all(nodes)
    expected = known.plan(Tier.GPU, 35, {Tier.HOST: 20})
    assert expected
    for seed in range(10):
        planner = a_policy(name)
        planner.add_all(random.Random(seed).sample(nodes, len(nodes)))
        assert planner.plan(Tier.GPU, 35, {Tier.HOST: 20}) == expected


@pytest.mark.parametrize("weight", [0.0, 5e-324, 1e-300])
def test_losses_of_adaptcache_are_numbers_however_small_the_weight(weight: float) -> None:
    planner = a_policy("adaptcache")
    planner.add_all(chain(3, weight))
    plan = planner.plan(Tier.GPU, 30, {Tier.HOST: 10})
    assert plan and all(math.isfinite(decision.loss) for decision in plan)
