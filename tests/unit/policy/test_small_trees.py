"""Small trees: planned as a whole where node by node is far from the best, by the rules of every other plan."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import assert_closed, execute, make_node, random_forest

from sglang_evicpress.core import EXACT, Decision, Form, LowerCopy, NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner, plan
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.tree_options import TreeOptions, tree_options
from sglang_evicpress.policy.tree_search import Choice, TreeSearch

FORMS = (Form("keydiff", 0.5), Form("knorm", 0.25))
TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
MENU, PLAIN = Menu(FORMS, TIERS), Menu((), TIERS)
MENUS = (MENU, Menu(FORMS), Menu(FORMS, TIERS, 1, 16), Menu(FORMS, (Tier.GPU, Tier.SSD)))
COSTS = CostSnapshot(
    PrefillCost(0.0, 0.01, 1e-6), {Tier.HOST: TransferCost(0.0, 1e4), Tier.SSD: TransferCost(0.0, 1e3)}, {}
)


def _planner(nodes: Sequence[NodeStats], menu: Menu) -> Planner:
    planner = make_planner("evicpress", menu, alpha=1.0, costs=COSTS)
    planner.add_all(nodes)
    return planner


def _taken(decisions: Sequence[Decision]) -> list[tuple[int, str]]:
    return [(decision.node_id, str(decision.option)) for decision in decisions]


def _node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALL", 0)
    monkeypatch.setattr(plan, "MIDDLING", 0)


def test_a_parent_leaves_with_its_child_where_the_child_alone_would_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        make_node(1, menu=PLAIN, tokens=120, weight=0.5),
        make_node(2, 1, menu=PLAIN, tokens=40, depth=120, weight=0.5),
        make_node(3, menu=PLAIN, tokens=130, weight=3.0),
    ]
    assert _taken(_planner(nodes, PLAIN).plan(Tier.GPU, 150, {Tier.HOST: 50})) == [(2, "drop"), (1, "drop")]
    _node_by_node(monkeypatch)  # the child goes to the host, where its parent does not fit: the third has to go
    assert _taken(_planner(nodes, PLAIN).plan(Tier.GPU, 150, {Tier.HOST: 50})) == [(3, "drop"), (2, "exact/host")]


def test_where_little_is_lost_no_better_plan_is_sought() -> None:
    nodes = [
        make_node(1, menu=PLAIN, tokens=120, weight=0.5),
        make_node(2, 1, menu=PLAIN, tokens=40, depth=120, weight=0.5),
        make_node(3, menu=PLAIN, tokens=130, weight=3.0),
    ]
    planner = _planner(nodes, PLAIN)
    searched = planner.plan(Tier.GPU, 150, {Tier.HOST: 50})
    planner.least_loss = 10.0  # dropping the third loses 3.9
    greedy = planner.plan(Tier.GPU, 150, {Tier.HOST: 50})
    assert _taken(greedy) == [(3, "drop"), (2, "exact/host")] != _taken(searched)
    assert sum(decision.loss for decision in searched) < sum(decision.loss for decision in greedy) < 10.0


def test_also_in_haste_a_parent_leaves_with_its_child() -> None:
    nodes = [
        make_node(1, menu=PLAIN, tokens=120, weight=0.5),
        make_node(2, 1, menu=PLAIN, tokens=40, depth=120, weight=0.5),
        make_node(3, menu=PLAIN, tokens=130, weight=3.0),
    ]
    copies = {2: (LowerCopy(Tier.HOST, EXACT, 40, 1.0),)}
    taken = _taken(_planner(nodes, PLAIN).plan(Tier.GPU, 150, lower_copies_of=copies))
    assert taken == [(2, "drop"), (1, "drop")]
    copies[1] = (LowerCopy(Tier.HOST, EXACT, 120, 1.0),)  # now it costs nothing to go
    taken = _taken(_planner(nodes, PLAIN).plan(Tier.GPU, 150, lower_copies_of=copies))
    assert taken == [(2, "exact/host"), (1, "exact/host")]


def test_what_turns_out_not_to_be_needed_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = (1.0, 0.4, 0.1)
    nodes = [
        make_node(1, menu=MENU, tokens=40, weight=2.0, curve=curve),
        make_node(2, 1, menu=MENU, tokens=100, depth=40, weight=2.0, curve=curve),
        make_node(3, menu=MENU, tokens=40, curve=curve),
    ]
    assert _taken(_planner(nodes, MENU).plan(Tier.GPU, 90, {Tier.HOST: 100})) == [(2, "exact/host")]
    _node_by_node(monkeypatch)  # drops the third first, and that is too little
    taken = _taken(_planner(nodes, MENU).plan(Tier.GPU, 90, {Tier.HOST: 100}))
    assert taken == [(3, "drop"), (2, "exact/host")]


def test_only_small_trees_and_long_plans_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def better(search: TreeSearch, given: Choice, prices: Sequence[float]) -> None:
        searched.append(len(given.places))

    monkeypatch.setattr(TreeSearch, "better", better)
    nodes = [make_node(i, menu=PLAIN, weight=1.0 + i / 1000) for i in range(300)]
    for num, demand in ((128, 1_000), (129, 1_000), (300, 20_000)):
        _planner(nodes[:num], PLAIN).plan(Tier.GPU, demand)
    assert searched == [128, 300]
    _planner(nodes, PLAIN).plan(Tier.GPU, 20_000, lower_copies_of={})  # someone waits
    assert searched == [128, 300]


def test_a_plan_that_loses_next_to_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeSearch, "better", None)  # not callable: it would raise
    nodes = [make_node(i, menu=PLAIN, weight=0.001 if i == 7 else 1.0) for i in range(20)]
    assert _taken(_planner(nodes, PLAIN).plan(Tier.GPU, 100)) == [(7, "drop")]


# --- random trees


def _cache(seed: int, most: int = 16) -> tuple[Menu, list[NodeStats], dict[Tier, int], int]:
    """A menu, a forest or a chain, the free bytes below, and what must be freed; on a menu of pages sizes are whole
    pages."""
    draw = random.Random(seed)
    menu = draw.choice(MENUS)
    tiers = [int(tier) for tier in menu.tiers]
    page = menu.page_size
    nodes = random_forest(draw, menu, draw.randint(1, most), tiers=[0, *tiers], tokens=(1, 80), locked=0.05)
    if draw.random() < 0.3:
        nodes = [replace(node, parent_id=node.id - 1 if node.id else None) for node in nodes]
        lowest = 0
        for number, node in enumerate(nodes):
            lowest = max(lowest, int(node.tier))
            locked = node.is_locked and lowest == 0
            nodes[number] = replace(node, tier=Tier(lowest), is_locked=locked)
        for number in range(len(nodes) - 1, 0, -1):
            if nodes[number].is_locked:
                nodes[number - 1] = replace(nodes[number - 1], is_locked=True)
    if page > 1:
        nodes = [
            replace(
                node, num_tokens=node.num_tokens * page, num_bytes=menu.num_bytes(node.form, node.num_tokens * page)
            )
            for node in nodes
        ]
    room = {tier: draw.choice((0, draw.randint(0, 200 * page))) for tier in menu.tiers[1:]}
    movable = sum(node.num_bytes for node in nodes if node.tier == Tier.GPU and not node.is_locked)
    return menu, nodes, room, draw.randint(0, movable)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_plan_of_a_small_tree_keeps_to_capacities_locks_and_prefixes(seed: int) -> None:
    menu, nodes, room, demand = _cache(seed)
    planner = _planner(nodes, menu)
    held = list(planner.index.num_bytes)
    locked = {node.id for node in nodes if node.is_locked}
    decisions = planner.plan(Tier.GPU, demand, room)
    assert planner.plan(Tier.GPU, demand, room) == decisions
    assert len({decision.node_id for decision in decisions}) == len(decisions)
    for decision in decisions:
        assert decision.node_id not in locked
        before = planner.index.candidates[decision.node_id]
        assert decision.option.tier is None or decision.option.tier >= before.tier
        execute(planner, [decision])
        assert_closed(planner)
        for tier in menu.tiers[1:]:
            assert planner.index.num_bytes[tier] <= held[tier] + room.get(tier, 0)
    assert held[0] - planner.index.num_bytes[0] >= demand


def _utility(planner: Planner) -> float:
    """The total of what is in the index, over that of dropping it all."""
    policy = planner.policy
    assert isinstance(policy, EvicPressPolicy)
    total = 0.0
    for one in planner.index.candidates.values():
        dropped = policy.alpha - COSTS.prefill.marginal_seconds(one.num_tokens, one.depth_tokens)
        total += one.weight * (policy.alpha * one.quality - policy.delay_s(one) - dropped)
    return total


def _gain(menu: Menu, nodes: Sequence[NodeStats], demand: int, room: Mapping[Tier, int]) -> tuple[float, float]:
    """What a plan leaves, over dropping everything, and the sum of what its decisions say they lose."""
    planner = _planner(nodes, menu)
    decisions = planner.plan(Tier.GPU, demand, room)
    execute(planner, decisions)
    return _utility(planner), sum(decision.loss for decision in decisions)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_losses_are_those_of_the_formula(seed: int) -> None:
    menu, nodes, room, demand = _cache(seed)
    before = _utility(_planner(nodes, menu))
    after, lost = _gain(menu, nodes, demand, room)
    assert before - after == pytest.approx(lost, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_plan_is_never_worth_less_than_node_by_node_nor_than_dropping_everything(seed: int) -> None:
    menu, nodes, room, demand = _cache(seed)
    gain, _ = _gain(menu, nodes, demand, room)
    with pytest.MonkeyPatch.context() as patched:
        _node_by_node(patched)
        assert gain >= _gain(menu, nodes, demand, room)[0] - 1e-9
    if demand and not any(node.is_locked for node in nodes):
        others = [node for node in nodes if node.tier > Tier.GPU or not node.num_bytes]  # which need not go
        assert gain >= sum(min(0.0, _utility(_planner([node], menu))) for node in others) - 1e-9


def _best(menu: Menu, nodes: Sequence[NodeStats], demand: int, room: Mapping[Tier, int]) -> float:
    """The most that any plan can leave over dropping everything, by looking at all of them; what need not go is worth
    no more elsewhere."""
    planner = _planner(nodes, menu)
    policy, held = planner.policy, planner.index.num_bytes
    assert isinstance(policy, EvicPressPolicy)
    options = tree_options(planner.index.candidates.values(), policy, int(Tier.GPU))
    assert options is not None
    capacity = [held[tier] + room.get(Tier(tier), 0) for tier in options.tiers[:-1]]
    capacity[0] = held[0] - demand
    every = [
        [(place, slot) for place, options in enumerate(node) for slot in range(len(options))]
        for node in options.options
    ]
    best = -math.inf
    for chosen in itertools.product(*every):
        if any(
            parent >= 0 and chosen[parent][0] > place
            for parent, (place, _) in zip(options.parents, chosen, strict=True)
        ):
            continue
        room_taken = [0.0] * len(options.tiers)
        for number, (place, slot) in enumerate(chosen):
            room_taken[place] += options.room[number, place, slot]
        if all(taken <= most for taken, most in zip(room_taken, capacity, strict=False)):
            best = max(best, sum(options.worth[number, place, slot] for number, (place, slot) in enumerate(chosen)))
    return best - float(options.worth[:, -1, 0].sum())


def test_tiny_trees_are_near_the_best_of_all_plans() -> None:
    gains = bests = 0.0
    shares = []
    for seed in range(150):
        menu, nodes, room, demand = _cache(seed, most=4)
        if not demand or any(node.is_locked for node in nodes):
            continue
        best, (gain, _) = _best(menu, nodes, demand, room), _gain(menu, nodes, demand, room)
        gains, bests = gains + gain, bests + best
        if best > 0.01 * sum(node.weight for node in nodes):
            shares.append(gain / best)
    assert gains >= 0.98 * bests
    assert sum(share >= 0.9 for share in shares) >= 0.95 * len(shares)


# --- the search itself


def _options(nodes: Sequence[NodeStats], menu: Menu) -> TreeOptions:
    policy = _planner(nodes, menu).policy
    assert isinstance(policy, EvicPressPolicy)
    options = tree_options(_planner(nodes, menu).index.candidates.values(), policy, int(Tier.GPU))
    assert options is not None
    return options


def test_options_of_a_node_are_its_form_here_those_below_and_the_drop() -> None:
    node = make_node(1, menu=MENU, curve=(1.0, 0.9, 0.95))
    (found,) = _options([node], MENU).options
    assert [[(str(option[1]), option[2]) for option in options] for options in found] == [
        [("exact", 100), ("knorm@0.25", 25)],  # knorm is better in fewer bytes than keydiff
        [("exact", 100), ("knorm@0.25", 25)],
        [("knorm@0.25", 25)],  # the SSD takes 0.1 s for all of it
        [("None", 0)],
    ]
    locked = _options([replace(node, is_locked=True)], MENU)
    assert [[len(options) for options in node] for node in locked.options] == [[1, 0, 0, 0]]


def test_a_node_on_a_tier_that_is_not_on_the_menu_has_no_options() -> None:
    policy = _planner([], Menu(FORMS)).policy
    assert isinstance(policy, EvicPressPolicy)
    index = _planner([make_node(1, menu=MENU, tier=Tier.HOST)], MENU).index
    assert tree_options(index.candidates.values(), policy, int(Tier.GPU)) is None


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.0, 1.0))
def test_what_a_search_finds_fits_is_closed_and_worth_what_it_says(seed: int, share: float) -> None:
    draw = random.Random(seed)
    options = _options(random_forest(draw, MENU, draw.randint(1, 40)), MENU)
    numbers = np.arange(len(options.places))
    held = [float(options.room[options.places == place, place, 0].sum()) for place in range(3)]
    capacity = [float(int(share * held[0])), held[1] + draw.randint(0, 100), held[2]]
    last = np.full(len(numbers), len(options.tiers) - 1)
    dropped = Choice(float(options.worth[:, -1, 0].sum()), last, np.zeros(len(numbers), np.int64))
    found = TreeSearch(options, capacity).better(dropped, [0.0] * 4)
    if found is None:
        return
    assert found.value == pytest.approx(float(options.worth[numbers, found.places, found.slots].sum()))
    assert found.value > dropped.value
    for place in range(3):
        taken = options.room[numbers, found.places, found.slots][found.places == place].sum()
        assert taken <= capacity[place]
    for number, parent in enumerate(options.parents):
        assert parent < 0 or found.places[parent] <= found.places[number]
