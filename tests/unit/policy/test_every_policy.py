"""Properties of every policy by name: locks, prefix closure, determinism, and the names themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import NAMES, assert_closed, each_policy, execute, random_forest

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import POLICY_NAMES, SERVER_POLICY_NAMES, Planner, make_planner, policy_info
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu

FORMS = {form for name in NAMES for form in policy_info(name).forms}
MENU = Menu((*FORMS, Form("knorm", 0.2)), (Tier.GPU, Tier.HOST, Tier.SSD), page_size=4)
COSTS = CostSnapshot(
    PrefillCost(0.01, 1e-3, 1e-6), {Tier.HOST: TransferCost(1e-3, 1e5), Tier.SSD: TransferCost(1e-2, 1e4)}, {}
)
CURVE = [form.kept_fraction**0.5 for form in MENU.forms]
ROOM = {Tier.HOST: 150, Tier.SSD: 100}


trees = st.builds(
    lambda draw, size: random_forest(draw, MENU, size, tokens=(1, 60), locked=0.15), st.randoms(), st.integers(0, 14)
)


def _policy(name: str) -> Planner:
    next_use = {node_id: float(node_id * 7 % 5) for node_id in range(20)}
    return make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=CURVE, next_use=next_use)


@each_policy
@given(nodes=trees, demand=st.integers(1, 400))
@settings(max_examples=40)
def test_plans_free_enough_keep_prefixes_and_leave_locked_nodes(name: str, nodes: list[NodeStats], demand: int) -> None:
    planner = _policy(name)
    planner.add_all(nodes)
    before = list(planner.index.num_bytes)
    locked = {node.id for node in nodes if node.is_locked}
    movable = before[0] - planner.index.locked_bytes[0]
    plan = planner.plan(Tier.GPU, demand, ROOM)
    assert len({decision.node_id for decision in plan}) == len(plan)
    assert not locked & {decision.node_id for decision in plan}
    for decision in plan:
        execute(planner, [decision])
        assert_closed(planner)
    assert before[0] - planner.index.num_bytes[0] >= min(demand, movable)
    for tier, room in ROOM.items():
        assert planner.index.num_bytes[tier] <= before[tier] + room


@each_policy
@given(nodes=trees, demand=st.integers(1, 400), data=st.data())
@settings(max_examples=25)
def test_the_plan_depends_neither_on_the_order_of_nodes_nor_on_planning_before(
    name: str, nodes: list[NodeStats], demand: int, data: st.DataObject
) -> None:
    planner, other = _policy(name), _policy(name)
    planner.add_all(nodes)
    waiting = list(nodes)
    known: set[int | None] = {None}
    while waiting:  # any order in which parents come before their children
        next_nodes = [node for node in waiting if node.parent_id in known]
        node = data.draw(st.sampled_from(next_nodes))
        waiting.remove(node)
        known.add(node.id)
        other.add(node)
    plan = planner.plan(Tier.GPU, demand, ROOM)
    assert other.plan(Tier.GPU, demand, ROOM) == plan
    assert planner.plan(Tier.GPU, demand, ROOM) == plan


@each_policy
@given(nodes=trees, rounds=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 80)), max_size=8))
@settings(max_examples=25)
def test_a_book_kept_in_step_plans_as_one_whose_heaps_are_new(
    name: str, nodes: list[NodeStats], rounds: list[tuple[int, int]]
) -> None:
    planner = _policy(name)
    planner.add_all(nodes)
    for tick, (node_id, demand) in enumerate(rounds, start=10):
        candidate = planner.index.candidates.get(node_id)
        if candidate is not None:
            planner.touch(node_id, candidate.weight + 1.0, candidate.num_hits + 1, tick)
        plan = planner.plan(Tier.GPU, demand, ROOM)
        planner.index.rebuild()
        assert planner.plan(Tier.GPU, demand, ROOM) == plan
        execute(planner, plan)


@each_policy
def test_a_policy_has_the_name_it_was_asked_for(name: str) -> None:
    assert _policy(name).name == name


def test_only_the_simulator_knows_the_future() -> None:
    assert set(POLICY_NAMES) - set(SERVER_POLICY_NAMES) == {"belady"}
    with pytest.raises(ValueError, match="'belady' has no next_use"):
        make_planner("belady", MENU, alpha=1.0, costs=COSTS)


def test_adaptcache_needs_its_offline_curve() -> None:
    with pytest.raises(ValueError, match="'adaptcache' has no mean_curve"):
        make_planner("adaptcache", MENU, alpha=1.0, costs=COSTS)


@pytest.mark.parametrize(
    "name",
    ["", "LRU", "fifo", "keydiff@0.5", "h2o@0.5+lru", "keydiff@1.5+lru", "exact+lru", "+lru", "impress"]
    + ["impress@", "impress@0", "impress@1", "impress@nan", "impress@few", "keydiff@0.5+lfu"],
)
def test_an_unknown_name_prints_the_list(name: str) -> None:
    for refuse in (lambda: policy_info(name), lambda: make_planner(name, MENU, alpha=1.0, costs=COSTS)):
        with pytest.raises(ValueError, match="is not known: expected one of") as error:
            refuse()
        assert repr(name) in str(error.value)
        for accepted in POLICY_NAMES:
            assert accepted in str(error.value)


@pytest.mark.parametrize(
    ("name", "forms"),
    [("lru", ()), ("evicpress", ()), ("keydiff@0.5+lru", (Form("keydiff", 0.5),))],
)
def test_the_forms_a_name_needs(name: str, forms: tuple[Form, ...]) -> None:
    assert policy_info(name).forms == forms
