"""The order in which the policies that only choose a victim choose it, on books small enough to check by hand."""

from __future__ import annotations

import pytest
from tests.unit.policy.nodes import execute, make_node

from sglang_evicpress.core import DROP, Form, Option, Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.tlru import TlruPolicy

K50 = Form("keydiff", 0.5)
MENU = Menu((K50,), (Tier.GPU, Tier.HOST))
COSTS = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {Tier.HOST: TransferCost(0.0, 1e9)}, {})  # a second per token


def _policy(name: str, *, next_use: dict[int, float] | None = None) -> Planner:
    return make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=[1.0, 0.5], next_use=next_use)


def _victims(planner: Planner, num_bytes: int = 10**9, tier: Tier = Tier.GPU) -> list[int]:
    return [decision.node_id for decision in planner.plan(tier, num_bytes)]


def _fill(planner: Planner) -> None:
    """Uses 5, 1, 2, 1 of nodes 1 to 4, last at 10, 40, 30, 20."""
    for node_id, hits, last_use in ((1, 5, 10), (2, 1, 40), (3, 2, 30), (4, 1, 20)):
        planner.add(make_node(node_id, menu=MENU, tokens=100 * node_id, hits=hits, last_use=last_use))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [1, 4, 3, 2]),
        ("lfu", [4, 2, 3, 1]),
        ("slru", [4, 2, 1, 3]),
        ("hpt", [4, 2, 3, 1]),  # hits per token: 5/100, 1/200, 2/300, 1/400
        ("tlru", [1, 4, 3, 2]),  # all shorter than the threshold, hence all safe: by last use
    ],
)
def test_the_order_of_victims(name: str, order: list[int]) -> None:
    planner = _policy(name)
    _fill(planner)
    assert _victims(planner) == order


def test_equal_keys_go_by_last_use_and_then_by_id() -> None:
    planner = _policy("lfu")
    for node_id, last_use in ((5, 7), (3, 7), (9, 6)):
        planner.add(make_node(node_id, menu=MENU, last_use=last_use))
    assert _victims(planner) == [9, 3, 5]


def test_size_counts_for_hpt_only() -> None:
    nodes = [make_node(1, menu=MENU, tokens=1000, hits=4), make_node(2, menu=MENU, tokens=10, hits=2)]
    hpt, lfu = _policy("hpt"), _policy("lfu")
    hpt.add_all(nodes)
    lfu.add_all(nodes)
    assert _victims(hpt) == [1, 2]
    assert _victims(lfu) == [2, 1]


def test_a_use_saves_a_node() -> None:
    planner = _policy("lru")
    _fill(planner)
    planner.touch(1, 6.0, 6, 50)
    assert _victims(planner, 1) == [4]


def test_a_parent_follows_its_last_child() -> None:
    planner = _policy("lru")
    planner.add(make_node(1, menu=MENU, last_use=1))
    planner.add(make_node(2, 1, menu=MENU, depth=100, last_use=3))
    planner.add(make_node(3, 1, menu=MENU, depth=100, last_use=2))
    planner.add(make_node(4, menu=MENU, last_use=4))
    plan = planner.plan(Tier.GPU, 400)
    assert {decision.option for decision in plan} == {DROP}
    assert [decision.node_id for decision in plan] == [3, 2, 1, 4]


def test_a_node_goes_one_tier_down_and_from_the_last_one_away() -> None:
    planner = _policy("lru")
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST, last_use=5))
    planner.add(make_node(2, menu=MENU, last_use=1))
    plan = planner.plan(Tier.GPU, 1, {Tier.HOST: 0})
    assert [(decision.node_id, str(decision.option)) for decision in plan] == [(1, "drop"), (2, "exact/host")]


# belady


def test_belady_takes_the_farthest_next_use() -> None:
    next_use = {1: 10.0, 2: 30.0, 3: 20.0}
    planner = _policy("belady", next_use=next_use)
    _fill(planner)
    assert _victims(planner) == [4, 2, 3, 1]  # 4 is never used again


def test_belady_learns_of_a_new_next_use_with_the_use() -> None:
    next_use = {1: 0.0, 2: 30.0, 3: 20.0, 4: 40.0}
    planner = _policy("belady", next_use=next_use)
    _fill(planner)
    assert _victims(planner, 1) == [4]
    next_use[1] = 50.0
    planner.touch(1, 6.0, 6, 50)
    assert _victims(planner) == [1, 4, 2, 3]


# tlru


def _tlru(threshold: int, prompt: int) -> Planner:
    return Planner(TlruPolicy(MENU, threshold, prompt))


def test_tlru_trims_what_the_next_prompt_can_do_without() -> None:
    planner = _tlru(300, 100)  # the last 200 tokens of a conversation are safe to lose
    planner.add(make_node(1, menu=MENU, tokens=500, last_use=1))
    planner.add(make_node(2, 1, menu=MENU, tokens=150, depth=500, last_use=9))
    planner.add(make_node(3, menu=MENU, tokens=500, last_use=2))
    planner.add(make_node(4, 3, menu=MENU, tokens=250, depth=500, last_use=3))
    assert _victims(planner, 1) == [2]  # the last 150: safe, though the most recently used
    assert _victims(planner) == [2, 1, 4, 3]


def test_a_trimmed_conversation_is_not_trimmed_again() -> None:
    planner = _tlru(300, 100)
    for node_id, parent_id, depth in ((1, None, 0), (2, 1, 150), (3, 2, 300), (4, 3, 450)):
        planner.add(make_node(node_id, parent_id, menu=MENU, tokens=150, depth=depth, last_use=9))
    planner.add(make_node(5, menu=MENU, tokens=500, last_use=1))
    assert _victims(planner, 151) == [4, 5]
    planner.remove(4)
    assert _victims(planner, 1) == [5]
    planner.touch(3, 2.0, 2, 10)
    assert _victims(planner, 1) == [5]


def test_tlru_without_a_threshold_is_lru() -> None:
    planner = _tlru(0, 0)
    _fill(planner)
    assert _victims(planner) == [1, 4, 3, 2]


def test_tlru_sees_a_conversation_grow_through_a_split_node() -> None:
    planner = _tlru(300, 100)
    planner.add(make_node(2, menu=MENU, tokens=400, last_use=9))
    planner.add(make_node(1, menu=MENU, tokens=250, last_use=9))  # the upper part of 2, which keeps the lower
    planner.add(make_node(2, 1, menu=MENU, tokens=150, depth=250, last_use=9))
    planner.add(make_node(3, menu=MENU, tokens=400, last_use=1))
    assert _victims(planner, 1) == [2]
    planner.remove(2)
    assert _victims(planner, 1) == [3]


def test_tlru_refuses_negative_tokens() -> None:
    with pytest.raises(ValueError, match="prompt_tokens is -1: expected 0 or more"):
        TlruPolicy(MENU, 0, -1)


# gdsf


def test_gdsf_keys_by_hand() -> None:
    """key = age + hits * cost / size, a second per token, a byte per slot: the key of an exact node is its hits."""
    planner = _policy("gdsf")
    planner.add(make_node(1, menu=MENU, hits=3, last_use=1))
    planner.add(make_node(2, menu=MENU, hits=2, last_use=2))
    planner.add(make_node(3, menu=MENU, form=K50, hits=2, last_use=3))  # half the bytes for the same cost: key 4
    assert _victims(planner) == [2, 1, 3]
    execute(planner, planner.plan(Tier.GPU, 1))  # 2 is dropped: the age is now 2
    planner.add(make_node(4, menu=MENU, hits=1, last_use=4))  # key 2 + 1 = 3, that of node 1, and used later
    planner.add(make_node(5, menu=MENU, hits=3, last_use=5))  # key 2 + 3 = 5
    assert _victims(planner) == [1, 4, 3, 5]
    planner.touch(1, 1.0, 4, 6)  # key 2 + 4 = 6: a use brings it to the present age
    assert _victims(planner) == [4, 3, 5, 1]
    planner.add(make_node(3, menu=MENU, form=K50, hits=2, last_use=7))  # key 2 + 4 = 6: told by put as well as by touch
    assert _victims(planner) == [4, 5, 1, 3]


def test_a_node_that_comes_to_stand_on_another_parent_keeps_its_age() -> None:
    planner = _policy("gdsf")
    planner.add(make_node(1, menu=MENU, hits=1, last_use=1))
    planner.add(make_node(2, menu=MENU, hits=5, last_use=2))
    planner.add(make_node(3, menu=MENU, hits=3, last_use=3))
    execute(planner, planner.plan(Tier.GPU, 1))  # 1 is dropped: the age is now 1
    planner.add(make_node(4, menu=MENU, hits=9, last_use=9))
    planner.add(make_node(3, 4, menu=MENU, hits=3, last_use=3))  # split off: key 3 as before, not 1 + 3
    planner.add(make_node(5, menu=MENU, hits=2, last_use=5))  # key 1 + 2, and used later
    assert _victims(planner)[:2] == [3, 5]
    assert planner.policy.key(planner.index.candidates[3]) == 3.0


def test_planning_ages_nothing() -> None:
    planner = _policy("gdsf")
    planner.add(make_node(1, menu=MENU, hits=9, last_use=1))
    first = planner.plan(Tier.GPU, 1)
    assert planner.plan(Tier.GPU, 1) == first
    planner.add(make_node(2, menu=MENU, hits=1, last_use=2))
    assert _victims(planner, 1) == [2]


def test_gdsf_ages_each_tier_for_itself() -> None:
    planner = _policy("gdsf")
    planner.add(make_node(1, menu=MENU, hits=5, last_use=1))
    planner.add(make_node(2, menu=MENU, tier=Tier.HOST, hits=6, last_use=2))
    execute(planner, planner.plan(Tier.GPU, 1, {Tier.HOST: 1000}))
    assert planner.index.candidates[1].tier == Tier.HOST
    assert _victims(planner, tier=Tier.HOST) == [1, 2]  # 5 before 6: the age of the host is still 0
    planner.add(make_node(3, menu=MENU, hits=1, last_use=3))  # key 5 + 1
    planner.add(make_node(4, menu=MENU, hits=2, last_use=4))  # key 5 + 2
    planner.add(make_node(2, menu=MENU, hits=6, last_use=5))  # brought up: key 5 + 6, and ages nothing
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 10**9, {Tier.HOST: 1000})] == [3, 4, 2]
    planner.add(make_node(6, menu=MENU, tier=Tier.HOST, hits=4, last_use=6))
    assert _victims(planner, tier=Tier.HOST)[:2] == [6, 1]


def test_a_plan_gives_a_demoted_node_the_age_of_the_tier_it_comes_to() -> None:
    planner = _policy("gdsf")
    planner.add(make_node(1, menu=MENU, hits=5, last_use=1))
    execute(planner, planner.plan(Tier.GPU, 1))  # the age of the GPU is now 5, that of the host 0
    planner.add(make_node(2, menu=MENU, hits=1, last_use=2))  # 6 on the GPU, 1 on the host
    planner.add(make_node(3, menu=MENU, hits=9, last_use=3))
    planner.add(make_node(4, menu=MENU, tier=Tier.HOST, hits=3, last_use=4))
    plan = planner.plan(Tier.GPU, 200, {Tier.HOST: 100})
    assert [(decision.node_id, str(decision.option)) for decision in plan] == [(2, "drop"), (3, "exact/host")]


def test_a_deep_node_costs_more_to_lose() -> None:
    costs = CostSnapshot(PrefillCost(0.0, 1.0, 0.01), COSTS.load, {})
    planner = make_planner("gdsf", MENU, alpha=1.0, costs=costs)
    planner.add(make_node(1, menu=MENU, last_use=1, depth=1000))
    planner.add(make_node(2, menu=MENU, last_use=2))
    assert _victims(planner) == [2, 1]


def test_decisions_name_what_was_held() -> None:
    planner = _policy("lru")
    planner.add(make_node(1, menu=MENU, form=K50))
    (decision,) = planner.plan(Tier.GPU, 1, {Tier.HOST: 1000})
    assert decision.source == Option(K50, Tier.GPU, 50)
    assert decision.option == Option(K50, Tier.HOST, 50)
