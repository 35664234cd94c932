"""The index: counts, heaps that stay in step and small and do no work that nothing asks for, and refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.base import DROPPED
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu

HALF = Form("keydiff", 0.5)
MENU = Menu((HALF,), (Tier.GPU, Tier.HOST))
COSTS = CostSnapshot(PrefillCost(0.0, 0.01, 0.0), {Tier.HOST: TransferCost(0.0, 1e4)}, {})


def _policy(*nodes: NodeStats) -> Planner:
    planner = make_planner("evicpress", MENU, alpha=1.0, costs=COSTS)
    planner.add_all(nodes)
    return planner


def _order(planner: Planner, tier: Tier) -> list[int]:
    """The nodes of a tier in the order in which their steps come, each once: the rest is locked in turn."""
    found = []
    while (first := planner.index.first(tier)) is not None:
        found.append(first[0].id)
        planner.lock(first[0].id, True)
    for node_id in found:
        planner.lock(node_id, False)
    return found


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_after_any_changes_the_book_is_as_one_made_of_the_nodes_as_they_are(seed: int) -> None:
    draw, nodes, planner = random.Random(seed), dict[int, NodeStats](), _policy()
    for tick in range(draw.randint(1, 60)):
        kind, parents = draw.randrange(5), {node.parent_id for node in nodes.values()}
        leaves = [i for i in nodes if i not in parents]
        if kind <= 1 or not nodes:
            parent = draw.choice(list(nodes.values())) if nodes and draw.random() < 0.5 else None
            tier = Tier.GPU if parent is None else Tier(max(parent.tier, draw.randrange(2)))
            parent_id = None if parent is None else parent.id
            new = make_node(tick, parent_id, menu=MENU, tokens=draw.randint(1, 99), tier=tier, weight=draw.random())
            nodes[tick] = new
            planner.add(new)
        elif kind == 2:
            gone = draw.choice(leaves)
            del nodes[gone]
            planner.remove(gone)
        elif kind == 3:
            one = draw.choice(list(nodes.values()))
            nodes[one.id] = replace(one, weight=draw.random() * 3, num_hits=one.num_hits + 1, last_use=tick)
            planner.touch(one.id, nodes[one.id].weight, one.num_hits + 1, tick)
        else:
            one = nodes[draw.choice(leaves)]
            slots = MENU.num_bytes(HALF, one.num_tokens)
            changed = replace(one, form=HALF, num_bytes=slots, quality=0.5, allowed_forms=MENU.smaller(HALF))
            nodes[one.id] = draw.choice((changed, replace(one, tier=Tier.HOST)))
            planner.add(nodes[one.id])
    fresh = _policy(*nodes.values())
    assert planner.index.num_bytes == fresh.index.num_bytes
    assert planner.index.num_on == fresh.index.num_on
    for tier in MENU.tiers:
        assert _order(planner, tier) == _order(fresh, tier)
    for one in nodes:
        assert planner.index.candidates[one].lowest_tier == fresh.index.candidates[one].lowest_tier


def test_a_hit_postpones_a_node_and_a_smaller_weight_brings_it_forward() -> None:
    planner = _policy(*(make_node(i, menu=MENU, weight=float(i)) for i in (1, 2, 3)))
    assert _order(planner, Tier.GPU) == [1, 2, 3]
    planner.touch(1, 10.0, 2, 1)
    assert _order(planner, Tier.GPU) == [2, 3, 1]
    planner.touch(3, 0.5, 1, 0)
    assert _order(planner, Tier.GPU) == [3, 2, 1]


def test_other_costs_change_the_steps() -> None:
    planner = _policy(make_node(1, menu=MENU, curve=(1.0, 0.9)))
    first = planner.index.first(Tier.GPU)
    assert first is not None and first[1].tier == Tier.HOST
    planner.refresh(CostSnapshot(PrefillCost(0.0, 1e-6, 0.0), {Tier.HOST: TransferCost(1.0, 1e4)}, {}))
    first = planner.index.first(Tier.GPU)
    assert first is not None and first[1].tier == DROPPED


def test_many_changes_of_one_node_do_not_make_a_heap_grow() -> None:
    planner = _policy(*(make_node(i, menu=MENU) for i in range(10)))
    for tick in range(5_000):
        planner.touch(tick % 10, 1.0 / (2 + tick), 1, tick)  # ever lower: a new entry each
    assert len(planner.index.heaps[Tier.GPU]) <= 2 * 10 + 65


def test_a_locked_node_is_no_first_and_its_bytes_are_counted() -> None:
    planner = _policy(make_node(1, menu=MENU), make_node(2, menu=MENU, weight=2.0))
    planner.lock(1, True)
    planner.lock(1, True)
    assert planner.index.locked_bytes[Tier.GPU] == 100
    assert _order(planner, Tier.GPU) == [2]
    planner.lock(1, False)
    assert (planner.index.locked_bytes[Tier.GPU], _order(planner, Tier.GPU)) == (0, [1, 2])


def test_a_node_with_children_cannot_be_forgotten() -> None:
    planner = _policy(make_node(1, menu=MENU), make_node(2, 1, menu=MENU))
    with pytest.raises(ValueError, match="node 1 has children"):
        planner.remove(1)
    planner.remove(2)
    planner.remove(1)
    assert (planner.index.candidates, planner.index.num_bytes[0]) == ({}, 0)
    with pytest.raises(KeyError):
        planner.remove(1)


def test_a_hit_that_is_taken_back_counts_though_it_weighed_nothing() -> None:
    planner = make_planner("lfu", MENU, alpha=1.0, costs=COSTS)
    planner.add(make_node(1, menu=MENU, weight=2.0**60, last_use=1))
    planner.add(make_node(2, menu=MENU, weight=2.0**60, last_use=2, hits=3))
    for num_hits in (2, 3, 4):  # three requests wait for node 1, and their hits are too old to be seen in its weight
        planner.touch(1, 2.0**60, num_hits, 1)
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 1)] == [2]
    for num_hits in (3, 2, 1):
        planner.touch(1, 2.0**60, num_hits, 1)
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 1)] == [1]


def test_other_weights_reorder_the_nodes_and_build_no_hull_anew() -> None:
    planner = make_planner("evicpress", MENU, alpha=1.0, costs=COSTS)
    planner.add_all(make_node(node_id, menu=MENU, weight=float(node_id), last_use=node_id) for node_id in (1, 2, 3))
    memos = {node_id: candidate.memo for node_id, candidate in planner.index.candidates.items()}
    for node_id, weight in {1: 9.0, 2: 1.0, 3: 5.0}.items():
        planner.touch(node_id, weight, 1, node_id)
    assert planner.plan(Tier.GPU, 1)[0].node_id == 2
    assert all(candidate.memo is memos[candidate.id] for candidate in planner.index.candidates.values())
    planner.refresh(replace(COSTS, prefill=PrefillCost(0.0, 2e-4, 0.0)))
    assert not any(candidate.memo is memos[candidate.id] for candidate in planner.index.candidates.values())


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    """A heap of it would never end."""
    planner = make_planner("lru", Menu(()), alpha=1.0, costs=CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {}, {}))
    with pytest.raises(ValueError, match=r"node 1 has the weight (nan|inf): expected a finite number"):
        planner.add(make_node(1, menu=Menu(()), weight=weight))
