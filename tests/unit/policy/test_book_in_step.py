"""The book: counts, heaps that stay in step and small, and refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Form, NodeStats, Tier
from sglang_evicpress.policy import Policy, make_policy
from sglang_evicpress.policy.base import DROPPED
from sglang_evicpress.policy.cost_model import Costs, PrefillLaw, TransferLaw
from sglang_evicpress.policy.menu import Menu

HALF = Form("keydiff", 0.5)
MENU = Menu((HALF,), (Tier.GPU, Tier.HOST))
COSTS = Costs(PrefillLaw(0.0, 0.01, 0.0), {Tier.HOST: TransferLaw(0.0, 1e4)}, {})

MakeNode = Callable[..., NodeStats]


def _policy(*nodes: NodeStats) -> Policy:
    policy = make_policy("evicpress", MENU, alpha=1.0, costs=COSTS)
    policy.put_all(nodes)
    return policy


def _order(policy: Policy, tier: Tier) -> list[int]:
    """The nodes of a tier in the order in which their steps come, each once: the rest is locked in turn."""
    found = []
    while (first := policy.book.first(tier)) is not None:
        found.append(first[0].id)
        policy.lock(first[0].id, True)
    for node_id in found:
        policy.lock(node_id, False)
    return found


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_after_any_changes_the_book_is_as_one_made_of_the_nodes_as_they_are(seed: int, make_node: MakeNode) -> None:
    draw, nodes, policy = random.Random(seed), dict[int, NodeStats](), _policy()
    for tick in range(draw.randint(1, 60)):
        kind, parents = draw.randrange(5), {node.parent_id for node in nodes.values()}
        leaves = [i for i in nodes if i not in parents]
        if kind <= 1 or not nodes:
            parent = draw.choice(list(nodes.values())) if nodes and draw.random() < 0.5 else None
            tier = Tier.GPU if parent is None else Tier(max(parent.tier, draw.randrange(2)))
            parent_id = None if parent is None else parent.id
            new = make_node(tick, parent_id, menu=MENU, tokens=draw.randint(1, 99), tier=tier, weight=draw.random())
            nodes[tick] = new
            policy.put(new)
        elif kind == 2:
            gone = draw.choice(leaves)
            del nodes[gone]
            policy.forget(gone)
        elif kind == 3:
            one = draw.choice(list(nodes.values()))
            nodes[one.id] = replace(one, weight=draw.random() * 3, num_hits=one.num_hits + 1, last_use=tick)
            policy.touch(one.id, nodes[one.id].weight, one.num_hits + 1, tick)
        else:
            one = nodes[draw.choice(leaves)]
            slots = MENU.num_bytes(HALF, one.num_tokens)
            changed = replace(one, form=HALF, num_bytes=slots, quality=0.5, reachable=MENU.smaller(HALF))
            nodes[one.id] = draw.choice((changed, replace(one, tier=Tier.HOST)))
            policy.put(nodes[one.id])
    fresh = _policy(*nodes.values())
    assert policy.book.num_bytes == fresh.book.num_bytes
    assert policy.book.num_on == fresh.book.num_on
    for tier in MENU.tiers:
        assert _order(policy, tier) == _order(fresh, tier)
    for one in nodes:
        assert policy.book.records[one].floor == fresh.book.records[one].floor


def test_a_hit_postpones_a_node_and_a_smaller_weight_brings_it_forward(make_node: MakeNode) -> None:
    policy = _policy(*(make_node(i, menu=MENU, weight=float(i)) for i in (1, 2, 3)))
    assert _order(policy, Tier.GPU) == [1, 2, 3]
    policy.touch(1, 10.0, 2, 1)
    assert _order(policy, Tier.GPU) == [2, 3, 1]
    policy.touch(3, 0.5, 1, 0)
    assert _order(policy, Tier.GPU) == [3, 2, 1]


def test_weights_all_at_once(make_node: MakeNode) -> None:
    policy = _policy(*(make_node(i, menu=MENU, weight=float(i)) for i in (1, 2, 3)))
    policy.reweigh({1: 5.0, 2: 4.0, 3: 3.0})
    assert _order(policy, Tier.GPU) == [3, 2, 1]


def test_other_costs_change_the_steps(make_node: MakeNode) -> None:
    policy = _policy(make_node(1, menu=MENU, curve=(1.0, 0.9)))
    first = policy.book.first(Tier.GPU)
    assert first is not None and first[1].rank == Tier.HOST
    policy.refresh(Costs(PrefillLaw(0.0, 1e-6, 0.0), {Tier.HOST: TransferLaw(1.0, 1e4)}, {}))
    first = policy.book.first(Tier.GPU)
    assert first is not None and first[1].rank == DROPPED


def test_many_changes_of_one_node_do_not_make_a_heap_grow(make_node: MakeNode) -> None:
    policy = _policy(*(make_node(i, menu=MENU) for i in range(10)))
    for tick in range(5_000):
        policy.touch(tick % 10, 1.0 / (2 + tick), 1, tick)  # ever lower: a new entry each
    assert len(policy.book.heaps[Tier.GPU]) <= 2 * 10 + 65


def test_a_locked_node_is_no_first_and_its_bytes_are_counted(make_node: MakeNode) -> None:
    policy = _policy(make_node(1, menu=MENU), make_node(2, menu=MENU, weight=2.0))
    policy.lock(1, True)
    policy.lock(1, True)
    assert policy.book.locked_bytes[Tier.GPU] == 100
    assert _order(policy, Tier.GPU) == [2]
    policy.lock(1, False)
    assert (policy.book.locked_bytes[Tier.GPU], _order(policy, Tier.GPU)) == (0, [1, 2])


def test_a_node_with_children_cannot_be_forgotten(make_node: MakeNode) -> None:
    policy = _policy(make_node(1, menu=MENU), make_node(2, 1, menu=MENU))
    with pytest.raises(ValueError, match="node 1 has children"):
        policy.forget(1)
    policy.forget(2)
    policy.forget(1)
    assert (policy.book.records, policy.book.num_bytes[0]) == ({}, 0)
    with pytest.raises(KeyError):
        policy.forget(1)


def test_the_exact_form_is_first_on_every_menu() -> None:
    assert MENU.forms == (EXACT, HALF)
