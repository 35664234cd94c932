"""Sweeps: what changes many steps is spread over calls, none of which is about more nodes than it says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import each_policy, execute, make_node, random_forest

from sglang_evicpress.core import Decision, Form, LowerCopy, NodeStats, Tier
from sglang_evicpress.policy import index, make_planner, policy_info
from sglang_evicpress.policy.base import Candidate, Step
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

MENU = Menu((Form("keydiff", 0.5), Form("snapkv", 0.25), Form("knorm", 0.75, "int8")), (Tier.GPU, Tier.HOST, Tier.SSD))
LOADS = {Tier.HOST: TransferCost(1e-3, 1e5), Tier.SSD: TransferCost(1e-2, 1e4)}
COSTS = CostSnapshot(PrefillCost(0.0, 0.01, 1e-5), LOADS, {})
OTHERS = CostSnapshot(
    PrefillCost(0.1, 1e-3, 1e-4), {Tier.HOST: TransferCost(0.1, 1e3), Tier.SSD: TransferCost(0.0, 1e6)}, {}
)


def planner_of(nodes: list[NodeStats], costs: CostSnapshot = COSTS) -> Planner:
    planner = make_planner("evicpress", MENU, alpha=1.0, costs=costs)
    planner.add_all(nodes)
    return planner


@pytest.fixture
def no_tree_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly anything is swept at once."""
    monkeypatch.setattr(index, "SMALL", 0)
    monkeypatch.setattr(index, "FIRST_SWEPT", 1)


def disturb(planner: Planner, draw: random.Random, tick: int) -> None:
    """Some hits, by which weights also fall, and a lock that is taken or given back."""
    for node_id in draw.sample(sorted(planner.index.candidates), 5):
        candidate = planner.index.candidates[node_id]
        planner.touch(node_id, abs(candidate.weight + draw.choice((-0.5, 1.0))), candidate.num_hits + 1, tick)
    locked = draw.choice(sorted(planner.index.candidates))
    planner.lock(locked, not planner.index.candidates[locked].is_locked)


@pytest.mark.usefixtures("no_tree_is_small")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), slice_nodes=st.integers(1, 40))
def test_a_sweep_in_slices_ends_with_the_plan_of_an_index_made_anew(seed: int, slice_nodes: int) -> None:
    draw = random.Random(seed)
    nodes = random_forest(draw, MENU, 120, locked=0.05)
    planner = planner_of(nodes)
    planner.refresh(OTHERS)
    for tick in range(10, 1_000):
        if draw.random() < 0.5 and tick < 200:
            disturb(planner, draw, tick)
        if tick < 40 and draw.random() < 0.1:  # a change in the midst of a sweep begins another
            planner.index.begin_sweep()
        if planner.advance(slice_nodes) == 0:
            break
    else:
        pytest.fail("the sweep does not end")
    assert not planner.index.is_sweeping
    weighed = {
        candidate.id: replace(
            nodes[candidate.id],
            weight=candidate.weight,
            num_hits=candidate.num_hits,
            last_use=candidate.last_use,
            is_locked=candidate.is_locked,
        )
        for candidate in planner.index.candidates.values()
    }
    fresh = planner_of(list(weighed.values()), OTHERS)
    for tier in Tier:
        wanted = fresh.index.num_bytes[tier] // 3
        assert planner.plan(tier, wanted) == fresh.plan(tier, wanted)


@pytest.mark.usefixtures("no_tree_is_small")
@each_policy
def test_two_ranks_with_the_same_calls_make_the_same_plans_while_they_sweep(name: str) -> None:
    menu = Menu((Form("keydiff", 0.5), *policy_info(name).forms), (Tier.GPU, Tier.HOST))
    others = replace(COSTS, prefill=PrefillCost(0.0, 0.002, 1e-4))

    def rank() -> Iterator[list[Decision]]:
        draw = random.Random(7)
        planner = make_planner(
            name, menu, alpha=1.0, costs=COSTS, mean_curve=[1.0] * len(menu.forms), next_use={3: 1.0, 5: 2.0}
        )
        planner.add_all(random_forest(draw, menu, 150, tiers=(0, 0, 1)))
        planner.refresh(others)
        for tick in range(20):
            disturb(planner, draw, 100 + tick)
            planner.advance(3)
            plan = planner.plan(Tier.GPU, 40)
            yield plan
            execute(planner, plan)

    assert list(rank()) == list(rank())


class CountingPolicy(EvicPressPolicy):
    num_steps = 0

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        self.num_steps += 1
        return super().step(candidate, excluded_tiers, lower_copies)


def counted(num_nodes: int) -> tuple[Planner, CountingPolicy, Callable[[Callable[[], object]], int]]:
    """A planner, its policy, and the number of steps that something makes it work out."""
    policy = CountingPolicy(MENU, 1.0, COSTS)
    planner = Planner(policy)
    planner.add_all(
        make_node(i, menu=MENU, tokens=10 + i % 7, weight=1.0 + i, last_use=i, tier=Tier(i % 3))
        for i in range(num_nodes)
    )

    def steps_of(call: Callable[[], object]) -> int:
        before = policy.num_steps
        call()
        return policy.num_steps - before

    return planner, policy, steps_of


def test_no_call_is_about_more_nodes_than_it_says() -> None:
    planner, _, steps_of = counted(3_000)
    begins = steps_of(lambda: planner.refresh(OTHERS))
    assert 0 < begins <= len(Tier) * index.FIRST_SWEPT
    assert steps_of(planner.index.begin_sweep) <= len(Tier) * index.FIRST_SWEPT
    assert steps_of(lambda: planner.index.first(Tier.GPU)) <= index.MOVES_PER_LOOK + 2
    assert steps_of(lambda: planner.touch(1, 2.0, 2, 9_999)) == 1
    while planner.index.is_sweeping:
        assert steps_of(lambda: planner.advance(50)) <= 50


def test_hits_of_all_nodes_do_not_make_a_look_at_all_of_them() -> None:
    """They rise where they are in the heap, and the first of those that were not hit comes last of all."""
    planner, _, steps_of = counted(6_000)
    on_gpu = [i for i in range(6_000) if i % 3 == 0]
    for node_id in on_gpu[:-1]:
        planner.touch(node_id, 1e9 - node_id, 2, 10_000 + node_id)
    assert steps_of(lambda: planner.index.first(Tier.GPU)) <= index.MOST_LOOKED + 2
    while planner.advance(64):
        pass
    first = planner.index.first(Tier.GPU)
    assert first is not None and first[0].id == on_gpu[-1]


@pytest.mark.parametrize(("num_passed", "num_swept"), [(0, 0), (index.MOST_PASSED, index.MOVES_PER_LOOK)])
def test_a_look_sweeps_outdated_entries_only_where_too_many_came_first(num_passed: int, num_swept: int) -> None:
    planner, _, steps_of = counted(1_200)
    tick = 10_000
    while not planner.index.is_sweeping:  # until most entries are outdated
        tick += 1
        planner.touch(3 * (tick % 300 + 50), 1e6 + tick, 2, tick)
    while planner.index.first(Tier.GPU) is None:
        pass
    planner.index.num_passed = num_passed
    before = sum(planner.index._num_aside)
    assert planner.index.first(Tier.GPU) is not None
    assert before - sum(planner.index._num_aside) == num_swept


@pytest.mark.parametrize("is_locked", [False, True])
@each_policy
def test_after_very_many_hits_a_plan_takes_what_was_not_hit(name: str, is_locked: bool) -> None:
    """Nodes that are hit, also while a request holds them, must not be found by what they were worth when they
    came."""
    menu = Menu(tuple({*MENU.forms, *policy_info(name).forms}), MENU.tiers)
    curve = [form.kept_fraction for form in menu.forms]
    hot, cold = range(1_500), range(1_500, 1_600)
    next_use = {**dict.fromkeys(hot, 1.0), **dict.fromkeys(cold, 1e9)}
    planner = make_planner(name, menu, alpha=1.0, costs=COSTS, mean_curve=curve, next_use=next_use)
    planner.add_all(make_node(i, menu=menu, last_use=i, curve=curve) for i in hot)
    planner.add_all(make_node(i, menu=menu, last_use=i, curve=curve) for i in cold)
    for tick in range(3):
        for node_id in hot:
            planner.lock(node_id, is_locked)
            planner.touch(node_id, 1e3 * (tick + 2), tick + 2, 2_000 * (tick + 1) + node_id)
            planner.lock(node_id, False)
    plan = planner.plan(Tier.GPU, 20 * 100)
    assert plan and {decision.node_id for decision in plan} <= set(cold)


def test_a_small_tree_is_swept_at_once() -> None:
    planner, _, _ = counted(index.SMALL)
    planner.refresh(OTHERS)
    assert not planner.index.is_sweeping


@pytest.mark.usefixtures("no_tree_is_small")
def test_while_a_sweep_lasts_plans_are_of_what_came_first_before() -> None:
    planner, _, _ = counted(600)
    former = [decision.node_id for decision in planner.plan(Tier.GPU, 600)]
    planner.index.begin_sweep()
    assert [decision.node_id for decision in planner.plan(Tier.GPU, 600)] == former
    assert planner.index.is_sweeping


def test_hits_in_a_sweep_that_nobody_advances_do_not_make_the_heaps_grow() -> None:
    planner, _, _ = counted(1_000)
    for tick in range(40):
        planner.index.begin_sweep()
        for node_id in range(1_000):
            planner.touch(node_id, 1.0 + (node_id * 7 + tick) % 1_000, 2, 2_000 + tick)
    num_entries = sum(map(len, planner.index.heaps)) + sum(planner.index._num_aside)
    assert num_entries <= 5 * (1_000 + 3 * 64)
