"""The book of a policy where it must not lag behind, nor do work that nothing asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import make_policy
from sglang_evicpress.policy.base import Record
from sglang_evicpress.policy.cost_model import Costs, PrefillLaw
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.evicpress import EvicPressRule

MakeNode = Callable[..., NodeStats]
MENU = Menu((Form("keydiff", 0.5),))
COSTS = Costs(PrefillLaw(0.0, 1e-4, 0.0), {}, {})


def test_a_hit_that_is_taken_back_counts_though_it_weighed_nothing(make_node: MakeNode) -> None:
    policy = make_policy("lfu", MENU, alpha=1.0, costs=COSTS)
    policy.put(make_node(1, menu=MENU, weight=2.0**60, last_use=1))
    policy.put(make_node(2, menu=MENU, weight=2.0**60, last_use=2, hits=3))
    for num_hits in (2, 3, 4):  # three requests wait for node 1, and their hits are too old to be seen in its weight
        policy.touch(1, 2.0**60, num_hits, 1)
    assert [decision.node_id for decision in policy.plan(Tier.GPU, 1)] == [2]
    for num_hits in (3, 2, 1):
        policy.touch(1, 2.0**60, num_hits, 1)
    assert [decision.node_id for decision in policy.plan(Tier.GPU, 1)] == [1]


class CountingRule(EvicPressRule):
    prepared = 0

    def prepare(self, records: Iterable[Record]) -> None:
        super().prepare(records)
        self.prepared += 1


def test_other_weights_reorder_the_nodes_and_build_no_hull_anew(make_node: MakeNode) -> None:
    policy = make_policy("evicpress", MENU, alpha=1.0, costs=COSTS)
    rule = CountingRule(MENU, 1.0, COSTS)
    policy.rule = policy.book.rule = rule
    policy.put_all(make_node(node_id, menu=MENU, weight=float(node_id), last_use=node_id) for node_id in (1, 2, 3))
    memos = {node_id: record.memo for node_id, record in policy.book.records.items()}
    policy.reweigh({1: 9.0, 2: 1.0, 3: 5.0})
    assert policy.plan(Tier.GPU, 1)[0].node_id == 2
    assert all(record.memo is memos[record.id] for record in policy.book.records.values()) and rule.prepared == 0
    policy.refresh(Costs(PrefillLaw(0.0, 2e-4, 0.0), {}, {}))
    assert rule.prepared == 1


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused(make_node: MakeNode, weight: float) -> None:
    """A heap of it would never end."""
    policy = make_policy("lru", Menu(()), alpha=1.0, costs=Costs(PrefillLaw(0.0, 1.0, 0.0), {}, {}))
    with pytest.raises(ValueError, match=r"node 1 has the weight (nan|inf): expected a finite number"):
        policy.put(make_node(1, menu=Menu(()), weight=weight))
