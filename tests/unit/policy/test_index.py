"""The index of a policy where it must not lag behind, nor do work that nothing asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.base import Candidate
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

MakeNode = Callable[..., NodeStats]
MENU = Menu((Form("keydiff", 0.5),))
COSTS = CostSnapshot(PrefillCost(0.0, 1e-4, 0.0), {}, {})


def test_a_hit_that_is_taken_back_counts_though_it_weighed_nothing(make_node: MakeNode) -> None:
    planner = make_planner("lfu", MENU, alpha=1.0, costs=COSTS)
    planner.add(make_node(1, menu=MENU, weight=2.0**60, last_use=1))
    planner.add(make_node(2, menu=MENU, weight=2.0**60, last_use=2, hits=3))
    for num_hits in (2, 3, 4):  # three requests wait for node 1, and their hits are too old to be seen in its weight
        planner.touch(1, 2.0**60, num_hits, 1)
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 1)] == [2]
    for num_hits in (3, 2, 1):
        planner.touch(1, 2.0**60, num_hits, 1)
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 1)] == [1]


class CountingPolicy(EvicPressPolicy):
    prepared = 0

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        super().prepare(candidates)
        self.prepared += 1


def test_other_weights_reorder_the_nodes_and_build_no_hull_anew(make_node: MakeNode) -> None:
    planner = make_planner("evicpress", MENU, alpha=1.0, costs=COSTS)
    policy = CountingPolicy(MENU, 1.0, COSTS)
    planner.policy = planner.index.policy = policy
    planner.add_all(make_node(node_id, menu=MENU, weight=float(node_id), last_use=node_id) for node_id in (1, 2, 3))
    memos = {node_id: candidate.memo for node_id, candidate in planner.index.candidates.items()}
    planner.reweigh({1: 9.0, 2: 1.0, 3: 5.0})
    assert planner.plan(Tier.GPU, 1)[0].node_id == 2
    assert (
        all(candidate.memo is memos[candidate.id] for candidate in planner.index.candidates.values())
        and policy.prepared == 0
    )
    planner.refresh(CostSnapshot(PrefillCost(0.0, 2e-4, 0.0), {}, {}))
    assert policy.prepared == 1


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused(make_node: MakeNode, weight: float) -> None:
    """A heap of it would never end."""
    planner = make_planner("lru", Menu(()), alpha=1.0, costs=CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {}, {}))
    with pytest.raises(ValueError, match=r"node 1 has the weight (nan|inf): expected a finite number"):
        planner.add(make_node(1, menu=Menu(()), weight=weight))
