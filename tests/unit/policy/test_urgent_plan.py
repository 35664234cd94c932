"""Urgent plans: a node leaves only by a drop or to a tier that has a copy of it, and is as that is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import EXAMPLES, assert_closed, each_policy, execute, make_node, random_forest

from sglang_evicpress.core import EXACT, Form, LowerCopy, NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner, policy_info
from sglang_evicpress.policy.base import lower_bytes
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.plan import AHEAD, AHEAD_OF_MANY, MANY_ON_GPU, Plan

HALF = Form("keydiff", 0.5)
TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
MENU = Menu((HALF, Form("knorm", 0.25), *policy_info("impress@0.1").forms), TIERS)
EVERYTHING = Menu((*MENU.forms, *policy_info(EXAMPLES["FORM+CODEC+lru"]).forms), TIERS)
PLAIN = Menu((), TIERS)
COSTS = CostSnapshot(
    PrefillCost(0.0, 0.01, 1e-6), {Tier.HOST: TransferCost(0.0, 1e4), Tier.SSD: TransferCost(0.0, 1e3)}, {}
)
ON_HOST, ON_SSD = 1 << Tier.HOST, 1 << Tier.SSD
ENDLESS = {Tier.HOST: 10**9, Tier.SSD: 10**9}


def _policy(*nodes: NodeStats, menu: Menu = PLAIN, name: str = "evicpress") -> Planner:
    next_use = {node_id: float(node_id * 7 % 5) for node_id in range(30)}
    mean_curve = [form.kept_fraction for form in menu.forms]
    planner = make_planner(name, menu, alpha=1.0, costs=COSTS, mean_curve=mean_curve, next_use=next_use)
    planner.add_all(nodes)
    return planner


def _ways(planner: Planner, on: Mapping[int, int]) -> dict[int, tuple[LowerCopy, ...]]:
    """Copies of nodes as they are, on the tiers below theirs whose bits are set."""
    found = {}
    for node_id, bits in on.items():
        if node_id not in planner.index.candidates:
            continue
        candidate = planner.index.candidates[node_id]
        tiers = [tier for tier in TIERS if tier > candidate.tier and bits >> tier & 1]
        found[node_id] = tuple(
            LowerCopy(tier, candidate.form, lower_bytes(planner.policy.menu, candidate), candidate.quality)
            for tier in tiers
        )
    return found


def _taken(planner: Planner, num_bytes: int, lower_copies_of: Mapping[int, int]) -> list[tuple[int, str]]:
    plan = planner.plan(Tier.GPU, num_bytes, ENDLESS, lower_copies_of=_ways(planner, lower_copies_of))
    return [(decision.node_id, str(decision.option)) for decision in plan]


@pytest.mark.parametrize(
    ("lower_copies_of", "taken"),
    [({}, "drop"), ({1: ON_HOST}, "exact/host"), ({1: ON_SSD}, "exact/ssd"), ({1: 6}, "exact/host")],
)
@pytest.mark.parametrize("name", ["evicpress", "lru", "gdsf"])
def test_a_node_goes_only_where_a_copy_lies(name: str, lower_copies_of: dict[int, int], taken: str) -> None:
    planner = _policy(make_node(1, menu=PLAIN), name=name)
    assert _taken(planner, 100, lower_copies_of) == [(1, taken)]
    plan = planner.plan(Tier.GPU, 100, lower_copies_of=_ways(planner, lower_copies_of))  # and it needs no room there
    assert [str(decision.option) for decision in plan] == [taken]


def test_what_has_no_copy_shrinks_rather_than_going_below() -> None:
    node = make_node(1, menu=MENU, curve=(1.0, 0.99, 0.0, 0.0), tokens=90, weight=5.0)
    assert _taken(_policy(node, menu=MENU), 40, {}) == [(1, "keydiff@0.5/gpu")]
    assert _taken(_policy(node, menu=MENU), 60, {}) == [(1, "drop")]


def test_a_smaller_form_below_is_passed_over_for_the_copy_that_is_there() -> None:
    node = make_node(1, menu=MENU, curve=(1.0, 1.0, 0.0, 0.0))
    planner = _policy(replace(node, num_tokens=1000, num_bytes=1000), menu=MENU)
    (normal,) = planner.plan(Tier.GPU, 1000, ENDLESS)
    assert str(normal.option) == "keydiff@0.5/host"
    assert _taken(planner, 1000, {1: ON_HOST}) == [(1, "exact/host")]


@pytest.mark.parametrize("name", ["keydiff@0.5+lru", "adaptcache", "evicpress"])
def test_what_the_plan_shrank_first_may_still_leave_as_the_copy_is(name: str) -> None:
    node = make_node(1, menu=MENU, curve=(1.0, 0.999, 0.0, 0.0), tokens=1000, hits=9)
    planner = make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=node.curve)
    planner.add(node)
    assert _taken(planner, 300, {1: ON_HOST}) == [(1, "keydiff@0.5/gpu")]
    (decision,) = planner.plan(Tier.GPU, 1000, lower_copies_of=_ways(planner, {1: ON_HOST}))
    assert (str(decision.option), decision.option.num_bytes, decision.quality) == ("exact/host", 1000, 1.0)
    if name == "evicpress":
        assert decision.loss == pytest.approx(0.1)


def test_a_node_is_dropped_where_loading_takes_longer_than_recomputing() -> None:
    node = make_node(1, menu=PLAIN)
    # 0.05 s, against 0.1 s from the SSD, 0.01 from the host
    fast = CostSnapshot(PrefillCost(0.0, 5e-4, 0.0), COSTS.load, {})
    planner = make_planner("evicpress", PLAIN, alpha=1.0, costs=fast)
    planner.add(node)
    assert _taken(planner, 1, {1: ON_SSD}) == [(1, "drop")]
    assert _taken(planner, 1, {1: ON_HOST}) == [(1, "exact/host")]


@pytest.mark.parametrize("name", ["evicpress", "lru"])
def test_of_a_branch_that_keeps_a_node_from_its_copy_only_what_must_goes(name: str) -> None:
    nodes = [
        make_node(1, menu=PLAIN, tokens=500),
        make_node(2, 1, menu=PLAIN, depth=500, tier=Tier.HOST),
        make_node(3, 2, menu=PLAIN, depth=600, tier=Tier.SSD),
        make_node(4, 1, menu=PLAIN, depth=500, tier=Tier.SSD),
    ]
    assert _taken(_policy(*nodes, name=name), 500, {1: ON_HOST}) == [(1, "exact/host")]
    assert _taken(_policy(*nodes, name=name), 500, {1: ON_SSD}) == [(3, "drop"), (2, "drop"), (1, "exact/ssd")]
    everything = [(3, "drop"), (2, "drop"), (4, "drop"), (1, "drop")]
    assert sorted(_taken(_policy(*nodes, name=name), 500, {})) == sorted(everything)


@pytest.mark.parametrize("name", ["evicpress", "lru"])
def test_of_what_is_felled_nothing_is_lost_that_lies_below_as_well(name: str) -> None:
    # A few tokens that contexts share are held on the GPU by contexts on the host; one of these is on no SSD yet.
    nodes = [
        make_node(1, menu=PLAIN, tokens=6),
        make_node(2, 1, menu=PLAIN, tokens=900, depth=6, tier=Tier.HOST),
        make_node(3, 2, menu=PLAIN, tokens=5, depth=906, tier=Tier.HOST),
        make_node(4, 1, menu=PLAIN, tokens=800, depth=6, tier=Tier.HOST),
    ]
    lower_copies_of = {1: ON_SSD, 2: ON_SSD}
    taken = _taken(_policy(*nodes, name=name), 6, lower_copies_of)
    assert taken == [(4, "drop"), (3, "drop"), (2, "exact/ssd"), (1, "exact/ssd")]
    assert [one for one, _ in _taken(_policy(*nodes[:3], name=name), 6, lower_copies_of)] == [3, 2, 1]


@pytest.mark.parametrize("name", ["evicpress", "lru"])
def test_of_nodes_without_a_step_the_one_for_which_least_is_lost_is_felled(name: str) -> None:
    # All were used at once: the first few tokens, a context that has only a tail above the SSD, another context.
    nodes = [
        make_node(1, menu=PLAIN, tokens=6),
        make_node(2, 1, menu=PLAIN, tokens=900, depth=6),
        make_node(3, 2, menu=PLAIN, tokens=5, depth=906, tier=Tier.HOST),
        make_node(4, 1, menu=PLAIN, tokens=800, depth=6, tier=Tier.HOST),
    ]
    taken = _taken(_policy(*nodes, name=name), 900, {1: ON_SSD, 2: ON_SSD})
    assert taken == [(3, "drop"), (2, "exact/ssd")]


def test_no_more_is_felled_than_has_to_be() -> None:
    nodes = [make_node(i, menu=PLAIN, last_use=i) for i in range(1, 6)]
    below = [make_node(10 + i, i, menu=PLAIN, depth=100, tier=Tier.HOST) for i in range(1, 6)]
    for name in ("evicpress", "lru"):
        assert _taken(_policy(*nodes, *below, name=name), 150, {}) == [
            (11, "drop"),
            (1, "drop"),
            (12, "drop"),
            (2, "drop"),
        ]


def test_nothing_above_a_locked_node_is_felled() -> None:
    nodes = [
        make_node(1, menu=PLAIN),
        make_node(2, 1, menu=PLAIN, depth=100, tier=Tier.HOST, is_locked=True),  # such as one that is being written
        make_node(3, menu=PLAIN, last_use=9),
        make_node(4, 3, menu=PLAIN, depth=100, tier=Tier.HOST),
    ]
    assert _taken(_policy(*nodes), 200, {}) == [(4, "drop"), (3, "drop")]


def test_a_ready_node_is_found_behind_many_that_are_not() -> None:
    cold = [make_node(i, menu=PLAIN, weight=1.0) for i in range(1, AHEAD)]
    planner = _policy(*cold, make_node(0, menu=PLAIN, weight=5.0))
    assert _taken(planner, 100, {0: ON_HOST}) == [(0, "exact/host")]  # 5 * 0.01 s lost, against 1 s of prefill


@pytest.mark.parametrize(("num_cold", "found"), [(AHEAD_OF_MANY, (0, "exact/host")), (AHEAD_OF_MANY + 1, (1, "drop"))])
def test_where_there_are_many_nodes_it_looks_at_fewer(num_cold: int, found: tuple[int, str]) -> None:
    cold = [make_node(i, menu=PLAIN, weight=1.0) for i in range(1, num_cold + 1)]
    hot = [make_node(i, menu=PLAIN, weight=1e3) for i in range(num_cold + 1, MANY_ON_GPU + 1)]
    planner = _policy(*cold, *hot, make_node(0, menu=PLAIN, weight=5.0))
    assert _taken(planner, 100, {0: ON_HOST}) == [found]


def test_a_drop_may_be_the_last_step_that_loses_least() -> None:
    large = make_node(1, menu=PLAIN, tokens=1000, weight=1.0)
    small = make_node(2, menu=PLAIN, tokens=20, weight=1.5)
    assert _taken(_policy(large, small), 10, {}) == [(2, "drop")]


def test_a_node_becomes_what_its_copy_is() -> None:
    node = make_node(1, menu=MENU, curve=(1.0, 0.9, 0.5, 0.1), tokens=1000, weight=2.0)
    smaller, exact = LowerCopy(Tier.HOST, HALF, 500, 0.9), LowerCopy(Tier.SSD, EXACT, 1000, 1.0)
    (decision,) = _policy(node, menu=MENU).plan(Tier.GPU, 1000, lower_copies_of={1: (smaller, exact)})
    assert (str(decision.option), decision.option.num_bytes, decision.quality) == ("keydiff@0.5/host", 500, 0.9)
    assert decision.loss == pytest.approx(2.0 * (0.1 + 0.05))  # alpha is 1, the host gives 1e4 bytes a second
    (decision,) = _policy(node, menu=MENU).plan(
        Tier.GPU, 1000, lower_copies_of={1: (smaller._replace(quality=0.0), exact)}
    )
    assert str(decision.option) == "exact/ssd"


def test_a_better_copy_than_the_node_is_a_way_out_too() -> None:
    node = make_node(1, menu=MENU, form=HALF, curve=(1.0, 0.5, 0.5, 0.1), tokens=1000)
    as_it_is, exact = LowerCopy(Tier.HOST, HALF, 500, 0.5), LowerCopy(Tier.SSD, EXACT, 1000, 1.0)
    slow = _policy(node, menu=MENU).plan(Tier.GPU, 500, lower_copies_of={1: (as_it_is, exact)})
    assert [str(one.option) for one in slow] == ["keydiff@0.5/host"]  # 0.45 against 1 - 1 s
    near = exact._replace(tier=Tier.HOST)
    (decision,) = _policy(node, menu=MENU).plan(Tier.GPU, 500, lower_copies_of={1: (near,)})
    assert (str(decision.option), decision.option.num_bytes) == ("exact/host", 1000)
    assert decision.loss == pytest.approx(-(0.5 - 0.1))


def test_also_without_haste_a_copy_that_is_better_than_the_node_is_a_way_out() -> None:
    node = make_node(1, menu=MENU, form=HALF, curve=(1.0, 0.5, 0.5, 0.1), tokens=20, tier=Tier.HOST)
    room = {Tier.SSD: 10**6}
    (dropped,) = _policy(node, menu=MENU).plan(Tier.HOST, 10, room)
    assert dropped.option.is_drop  # 0.2 s of prefill for all of the quality, against half of it in 0.01 s
    node = replace(node, lower_copies=(LowerCopy(Tier.SSD, EXACT, 20, 1.0),))
    (sent,) = _policy(node, menu=MENU).plan(Tier.HOST, 10, room)
    assert (str(sent.option), sent.quality) == ("exact/ssd", 1.0)


def test_nothing_shrinks_below_the_gpu_while_someone_waits() -> None:
    node = make_node(1, menu=MENU, curve=(1.0, 1.0, 0.0, 0.0), tier=Tier.HOST, tokens=1000)
    planner = _policy(node, menu=MENU)
    assert [str(one.option) for one in planner.plan(Tier.HOST, 500)] == ["keydiff@0.5/host"]
    assert [str(one.option) for one in planner.plan(Tier.HOST, 500, lower_copies_of={})] == ["drop"]
    (decision,) = planner.plan(Tier.HOST, 500, lower_copies_of=_ways(planner, {1: ON_SSD}))
    assert str(decision.option) == "exact/ssd"


# --- random caches


def _cache(seed: int) -> tuple[list[NodeStats], dict[int, int], int]:
    """A forest over three tiers, some of it locked; what is ready; and how much is short on the GPU. Nothing can be
    made of a node below the GPU, and nodes may hold no bytes."""
    draw = random.Random(seed)
    nodes = [
        node if node.tier == Tier.GPU else replace(node, allowed_forms=0)
        for node in random_forest(draw, EVERYTHING, draw.randint(1, 25), tokens=(0, 80), empty=0.1, locked=0.1)
    ]
    copies = {node.id: draw.choice((ON_HOST, ON_SSD, ON_HOST | ON_SSD)) for node in nodes if draw.random() < 0.5}
    return nodes, copies, draw.randint(1, 1 + sum(node.num_bytes for node in nodes if node.tier == Tier.GPU))


@each_policy
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(11802)  # what is below a node that has to go is dropped, which the search of the tree does not know
@example(34041)
def test_an_urgent_plan_frees_enough_waits_for_nothing_and_keeps_prefixes(name: str, seed: int) -> None:
    nodes, lower_copies_of, demand = _cache(seed)
    planner = _policy(*nodes, menu=EVERYTHING, name=name)
    before, movable = planner.index.num_bytes[0], planner.index.num_bytes[0] - planner.index.locked_bytes[0]
    plan = planner.plan(Tier.GPU, demand, lower_copies_of=_ways(planner, lower_copies_of))
    assert planner.plan(Tier.GPU, demand, ENDLESS, lower_copies_of=_ways(planner, lower_copies_of)) == plan
    assert len({decision.node_id for decision in plan}) == len(plan)
    for decision in plan:
        source, option = decision.source, decision.option
        if option.tier is not None and option.tier != source.tier:
            assert lower_copies_of[decision.node_id] >> option.tier & 1
            copy_of = {copy.tier: copy for copy in _ways(planner, lower_copies_of)[decision.node_id]}[option.tier]
            assert (option.form, option.num_bytes) == (source.form, copy_of.num_bytes)
            assert decision.quality == planner.index.candidates[decision.node_id].quality
        assert not planner.index.candidates[decision.node_id].is_locked
    for decision in plan:
        execute(planner, [decision])
        assert_closed(planner)
    assert before - planner.index.num_bytes[0] >= min(demand, movable)


@each_policy
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_copies_are_a_node_goes_only_as_one_of_them(name: str, seed: int) -> None:
    nodes, on, demand = _cache(seed)
    planner, draw = _policy(*nodes, menu=EVERYTHING, name=name), random.Random(seed)
    movable = planner.index.num_bytes[0] - planner.index.locked_bytes[0]
    forms = (EXACT, *EVERYTHING.forms[1:])
    lower_copies_of = {
        node_id: tuple(
            way if draw.random() < 0.3 else LowerCopy(way.tier, draw.choice(forms), draw.randint(0, 90), draw.random())
            for way in lower_copies
        )
        for node_id, lower_copies in _ways(planner, on).items()
    }
    before = planner.index.num_bytes[0]
    plan = planner.plan(Tier.GPU, demand, lower_copies_of=lower_copies_of)
    for decision in plan:
        option = decision.option
        if option.tier is not None and option.tier != decision.source.tier:
            lower_copies = [way[:3] for way in lower_copies_of[decision.node_id]]
            assert (option.tier, option.form, option.num_bytes) in lower_copies
        execute(planner, [decision])
    assert before - planner.index.num_bytes[0] >= min(demand, movable)


@each_policy
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_an_urgent_plan_depends_on_nodes_and_ready_alone(name: str, seed: int, data: st.DataObject) -> None:
    nodes, lower_copies_of, demand = _cache(seed)
    told = sorted(nodes, key=lambda node: (node.depth_tokens, node.id, data.draw(st.integers(0, 9))))
    planner, other = _policy(*nodes, menu=EVERYTHING, name=name), _policy(menu=EVERYTHING, name=name)
    other.add_all(reversed(told))
    shuffled = dict(data.draw(st.permutations(list(lower_copies_of.items()))))
    plan = planner.plan(Tier.GPU, demand, lower_copies_of=_ways(planner, lower_copies_of))
    unhurried = other.plan(Tier.GPU, demand // 2, {Tier.HOST: 100})
    assert other.plan(Tier.GPU, demand, lower_copies_of=_ways(other, shuffled)) == plan
    assert other.plan(Tier.GPU, demand // 2, {Tier.HOST: 100}) == unhurried


@each_policy
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_with_all_ready_it_is_the_plan_with_endless_room_where_forms_stay(name: str, seed: int) -> None:
    """Node by node: a search of the whole tree may also drop what is below, where nobody waits."""
    nodes, _, demand = _cache(seed)
    fixed = [replace(node, allowed_forms=0) for node in nodes]
    planner = _policy(*fixed, menu=EVERYTHING, name=name)
    ways = _ways(planner, {node.id: ON_HOST | ON_SSD for node in nodes})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plan, "search", lambda *_: None)
        assert planner.plan(Tier.GPU, demand, lower_copies_of=ways) == planner.plan(Tier.GPU, demand, ENDLESS)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_more_copies_never_lose_more_when_everything_must_go(seed: int) -> None:
    nodes, lower_copies_of, _ = _cache(seed)
    leaves = [replace(node, parent_id=None, tier=Tier.GPU) for node in nodes if node.num_bytes]
    planner = _policy(*leaves, menu=EVERYTHING)
    everything = sum(node.num_bytes for node in leaves)
    losses = []
    for copies in ({}, lower_copies_of, {node.id: ON_HOST | ON_SSD for node in leaves}):
        losses.append(
            sum(
                decision.loss for decision in planner.plan(Tier.GPU, everything, lower_copies_of=_ways(planner, copies))
            )
        )
    assert losses[0] + 1e-9 >= losses[1] and losses[1] + 1e-9 >= losses[2]
