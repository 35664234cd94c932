"""Plans for tenants that hold more than they may: compressing first, and only what is theirs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.policy.nodes import assert_closed, execute, make_node, random_forest

from sglang_evicpress.core import EXACT, Form, NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.compress_first import CompressFirstPolicy
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy
from sglang_evicpress.policy.tenant_plans import TenantPlans

FORMS = (Form("keydiff", 0.8), Form("keydiff", 0.5), Form("knorm", 0.5), Form("keydiff", 0.2), EXACT)
TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
MENU = Menu(FORMS[:4], TIERS)
COSTS = CostSnapshot(
    PrefillCost(0.01, 1e-3, 0.0), {Tier.HOST: TransferCost(1e-3, 1e6), Tier.SSD: TransferCost(1e-2, 1e5)}, {}
)
CURVE = (1.0, 0.98, 0.9, 0.85, 0.4)
ALL = dict.fromkeys(TIERS[1:], 10**6)


def _weigher(alpha: float = 1.0) -> EvicPressPolicy:
    return EvicPressPolicy(MENU, alpha, COSTS)


def _first(*nodes: NodeStats, least_quality: float = 0.0) -> Planner:
    planner = Planner(CompressFirstPolicy(_weigher(), least_quality))
    planner.add_all(nodes)
    return planner


def _node(node_id: int, parent_id: int | None = None, **given: object) -> NodeStats:
    return make_node(node_id, parent_id, **{"menu": MENU, "curve": CURVE, "tokens": 1000} | given)


def _taken(planner: Planner, num_bytes: int, tier: Tier = Tier.GPU) -> list[tuple[int, str]]:
    return [(decision.node_id, str(decision.option)) for decision in planner.plan(tier, num_bytes, ALL)]


def test_everything_shrinks_before_anything_leaves() -> None:
    """The policy of all would send a cold node to the host, where nothing of its quality is lost."""
    nodes = _node(1, weight=1e-6), _node(2)
    everyone = Planner(_weigher())
    everyone.add_all(nodes)
    assert _taken(everyone, 1000) == [(1, "exact/host")]
    planner = _first(*nodes)
    assert _taken(planner, 1000) == [(1, "keydiff@0.2/gpu"), (2, "keydiff@0.8/gpu")]
    assert _taken(planner, 1600) == [(1, "keydiff@0.2/gpu"), (2, "keydiff@0.2/gpu")]
    assert _taken(planner, 1800) == [(1, "keydiff@0.2/host"), (2, "keydiff@0.2/gpu")]


def test_nothing_shrinks_below_the_least_quality() -> None:
    planner = _first(_node(1, weight=1e-6), _node(2), least_quality=0.9)
    assert _taken(planner, 1000) == [(1, "keydiff@0.5/gpu"), (2, "keydiff@0.5/gpu")]
    assert _taken(planner, 1001) == [(1, "keydiff@0.5/host"), (2, "keydiff@0.5/gpu")]


def test_of_what_shrinks_that_comes_first_which_loses_least_per_byte() -> None:
    assert _taken(_first(_node(1, weight=3.0), _node(2, weight=2.0)), 100) == [(2, "keydiff@0.8/gpu")]


def test_also_below_the_gpu_it_shrinks_first() -> None:
    planner = _first(_node(1, tier=Tier.HOST, weight=1e-6), _node(2, tier=Tier.HOST))
    assert _taken(planner, 1000, Tier.HOST) == [(1, "keydiff@0.2/host"), (2, "keydiff@0.8/host")]


@pytest.mark.parametrize("seed", range(30))
def test_plans_of_random_forests_free_enough_and_keep_prefixes(seed: int) -> None:
    draw = random.Random(seed)
    nodes = list(random_forest(draw, MENU, draw.randint(1, 30), tokens=(0, 200), empty=0.1, locked=0.1))
    planner = _first(*nodes)
    index = planner.index
    movable = index.num_bytes[0] - index.locked_bytes[0]
    demand, before = draw.randint(1, 1 + movable), index.num_bytes[0]
    plan = planner.plan(Tier.GPU, demand, ALL)
    for decision in plan:
        assert not index.candidates[decision.node_id].is_locked
        execute(planner, [decision])
        assert_closed(planner)
    assert before - index.num_bytes[0] >= min(demand, movable)
    if any(decision.option.tier != decision.source.tier for decision in plan if decision.source.tier == Tier.GPU):
        stay = [one for one in index.candidates.values() if one.tier == Tier.GPU and not one.is_locked]
        assert all(Planner(_weigher()).policy.step(one, (1 << 5) - 1) is None for one in stay if one.num_bytes)


# ---- by tenant

OWNERS = ("acme", "law", None)


class Tenants:
    """A tree of three namespaces, of which the first two have limits, told to the plans as to the policy of all."""

    def __init__(self, seed: int, name: str = "evicpress") -> None:
        self.draw = random.Random(seed)
        self.menu = MENU
        self.everyone = make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=CURVE)
        self.plans = TenantPlans({"acme": {Tier.GPU: 1500, Tier.HOST: 500}, "law": {Tier.GPU: 0}, "free": {}})
        weigher = self.everyone.policy
        is_weigher = isinstance(weigher, EvicPressPolicy)
        make = lambda: make_planner(name, MENU, alpha=1.0, costs=COSTS, mean_curve=CURVE)  # noqa: E731
        self.plans.renew((lambda: Planner(CompressFirstPolicy(weigher))) if is_weigher else make)
        self.owner: dict[int, str | None] = {}
        for number, owner in enumerate(OWNERS):
            for node in random_forest(self.draw, MENU, 20, tokens=(1, 200)):
                moved = {"id": node.id + 1000 * number}
                if node.parent_id is not None:
                    moved["parent_id"] = node.parent_id + 1000 * number
                self.tell(replace(node, **moved), owner)

    def tell(self, node: NodeStats, owner: str | None) -> None:
        self.owner[node.id] = owner
        self.everyone.add(node)
        self.plans.add(owner, node)

    def assert_alike(self) -> None:
        assert list(self.plans.differences(self.everyone.index, self.owner.get)) == []


def test_plans_know_the_nodes_of_their_tenant_through_all_that_happens() -> None:
    tenants = Tenants(1)
    everyone, plans, draw = tenants.everyone, tenants.plans, tenants.draw
    for tick in range(300):
        node_id = draw.choice(list(everyone.index.candidates))
        candidate = everyone.index.candidates[node_id]
        is_leaf, is_locked, weight = not any(candidate.num_children or ()), not candidate.is_locked, draw.random()
        for one in (everyone, plans):
            match tick % 3:
                case 0:
                    one.touch(node_id, weight, 2, 10 + tick)
                case 1:
                    one.lock(node_id, is_locked)
                case 2 if is_leaf and tick % 4 == 0:
                    one.remove(node_id)
        plans.advance(4)
        tenants.assert_alike()
    assert len(everyone.index.candidates) < 60


def test_what_plans_have_otherwise_is_said() -> None:
    tenants = Tenants(1)
    tenants.everyone.lock(0, not tenants.everyone.index.candidates[0].is_locked)
    (said,) = tenants.plans.differences(tenants.everyone.index, tenants.owner.get)
    assert "locked; it holds" in said
    tenants.plans.renew(lambda: Planner(CompressFirstPolicy(_weigher())))
    said = next(tenants.plans.differences(tenants.everyone.index, tenants.owner.get))
    assert said == "the plans of a tenant know 0 nodes, it has 20"


@pytest.mark.parametrize("name", ["evicpress", "adaptcache", "lru", "gdsf", "s3fifo", "sieve"])
def test_what_is_held_too_much_is_found_and_freed_of_the_tenants_own(name: str) -> None:
    tenants = Tenants(2, name)
    plans = tenants.plans
    for _ in range(200):
        excesses = list(plans.excesses())
        if not excesses:
            break
        owner, tier, excess = excesses[0]
        assert excess == plans.held_bytes(owner, tier) - plans.limits[owner][tier]
        plan = plans.plan(owner, tier, excess, ALL, most_nodes=4)
        assert plan and len(plan) <= 8
        for decision in plan:
            assert tenants.owner[decision.node_id] == owner
            execute(tenants.everyone, [decision])
            if decision.option.is_drop:
                plans.remove(decision.node_id)
            else:
                candidate = tenants.everyone.index.candidates[decision.node_id]
                plans.add(owner, _as_node(candidate))
        tenants.assert_alike()
    described = plans.describe()
    assert set(described) == {"acme", "law"} and described["law"]["held_bytes"]["gpu"] == 0
    assert described["acme"]["held_bytes"]["gpu"] <= 1500 and described["acme"]["held_bytes"]["host"] <= 500


def _as_node(candidate: object) -> NodeStats:
    names = ("id", "parent_id", "form", "num_tokens", "num_bytes", "depth_tokens", "quality", "curve", "allowed_forms")
    more = ("weight", "num_hits", "last_use", "sinks", "is_locked", "exact_on", "lower_copies", "filled")
    fields = {name: getattr(candidate, name) for name in (*names, *more)}
    return NodeStats(tier=Tier(candidate.tier), **fields)


def test_no_more_rises_than_a_limit_leaves() -> None:
    plans = TenantPlans({"acme": {Tier.GPU: 1500}})
    plans.renew(lambda: Planner(CompressFirstPolicy(_weigher())))
    plans.add("acme", _node(1))
    plans.add(None, _node(2))
    assert plans.room_of(1, Tier.GPU) == 500 and plans.room_of(1, Tier.HOST) == float("inf")
    assert plans.room_of(2, Tier.GPU) == float("inf")
