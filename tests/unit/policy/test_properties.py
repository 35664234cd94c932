"""Properties of every plan, as far as they hold of a greedy whose last step frees what it frees."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import Decision, Form, NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.plan import Plan
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

FORMS = tuple(Form(press, kept) for press in ("keydiff", "snapkv") for kept in (0.75, 0.5, 0.25))
MENU = Menu(FORMS)
THREE = Menu(FORMS, (Tier.GPU, Tier.HOST, Tier.SSD))
COSTS = CostSnapshot(
    PrefillCost(0.01, 1e-3, 1e-6), {Tier.HOST: TransferCost(0.0, 1e4), Tier.SSD: TransferCost(0.0, 2e3)}, {}
)


def _forest(menu: Menu, seed: int, most: int = 20, trees: bool = True) -> list[NodeStats]:
    draw = random.Random(seed)
    nodes: list[NodeStats] = []
    for i in range(draw.randint(1, most)):
        parent = draw.choice(nodes) if trees and nodes and draw.random() < 0.6 else None
        qualities = sorted((draw.random() for _ in range(3)), reverse=True)
        curve = [1.0, *(qualities[int(4 - 4 * form.kept_fraction) - 1] for form in menu.forms[1:])]
        nodes.append(
            make_node(
                i,
                None if parent is None else parent.id,
                menu=menu,
                tokens=draw.randint(4, 200),
                depth=0 if parent is None else parent.depth_tokens + parent.num_tokens,
                curve=curve,
                weight=draw.choice((0.0, 1.0, draw.paretovariate(1.2))),
                last_use=draw.randrange(4),
                is_locked=False,
            )
        )
    return nodes


def _policy(nodes: Sequence[NodeStats], menu: Menu = MENU, alpha: float = 1.0) -> Planner:
    planner = make_planner("evicpress", menu, alpha=alpha, costs=COSTS)
    planner.add_all(nodes)
    return planner


def _loss(planner: Planner, demand: int) -> float:
    return sum(decision.loss for decision in planner.plan(Tier.GPU, demand))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_more_capacity_never_lowers_total_utility(seed: int, data: st.DataObject) -> None:
    """Exactly so, last steps included, on one tier of exact nodes without children: no step of them gains. Of plans
    node by node, that is: the search of small trees only ever loses less, by how much differs (``test_small_trees``).

    A parent that has shrunk under its child may gain by a drop once the child has gone, so that there more demand can
    do better than less; such gains are for ``plan_promotions``.
    """
    nodes = _forest(MENU, seed, trees=False)
    planner, total = _policy(nodes), sum(node.num_bytes for node in nodes)
    demands = sorted(data.draw(st.lists(st.integers(0, total), min_size=2, max_size=12)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plan, "search", lambda *_: None)
        losses = [_loss(planner, demand) for demand in demands]
    for less, more in itertools.pairwise(losses):
        assert less <= more + 1e-9


def _mean_quality(nodes: Sequence[NodeStats], plan: Sequence[Decision]) -> float:
    after = {decision.node_id: decision.quality for decision in plan}
    return sum(node.weight * after.get(node.id, node.quality) for node in nodes) / sum(node.weight for node in nodes)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 0.95), low=st.floats(0.05, 4.0), factor=st.floats(1.0, 20.0))
def test_more_alpha_lowers_the_weighted_quality_by_no_more_than_the_last_steps(
    seed: int, share: float, low: float, factor: float
) -> None:
    """Two optima O(a), O(b) of sum w (a q - d) give (b - a) (Q(b) - Q(a)) >= 0: quality rises with alpha.

    Each greedy total is within its last step's loss of the optimum: Q(b) >= Q(a) - (slack(a) + slack(b)) / (b - a).
    """
    nodes = [node for node in _forest(MENU, seed, trees=False) if node.weight > 0.0]
    demand = int(share * sum(node.num_bytes for node in nodes))
    high = low * factor
    if not nodes or high - low < 1e-6:
        return
    weighted, slack = [], 0.0
    for alpha in (low, high):
        planner = _policy(nodes, alpha=alpha)
        plan = planner.plan(Tier.GPU, demand)
        weighted.append(sum(node.weight for node in nodes) * _mean_quality(nodes, plan))
        slack += _last_step(planner, demand)
    assert weighted[1] >= weighted[0] - slack / (high - low) - 1e-9


def _last_step(planner: Planner, demand: int) -> float:
    """Largest loss of the greedy's last step: that of all steps on hulls whose turn can come last."""
    assert isinstance(planner.policy, EvicPressPolicy)
    largest = 0.0
    for candidate in planner.index.candidates.values():
        steps = planner.policy.choices(candidate)
        largest = max([largest, *(step.loss * candidate.weight for step in steps if step.num_bytes or step.tier)])
    return largest if demand > 0 else 0.0


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), low=st.floats(0.05, 4.0), factor=st.floats(1.0, 20.0))
def test_for_one_node_more_alpha_never_lowers_quality(seed: int, low: float, factor: float) -> None:
    (node,) = _forest(THREE, seed, most=1)
    qualities = []
    for alpha in (low, low * factor):
        plan = _policy([node], THREE, alpha).plan(Tier.GPU, node.num_bytes, {Tier.HOST: 10**6, Tier.SSD: 10**6})
        qualities.append(_mean_quality([node], plan) if node.weight else 1.0)
    assert qualities[0] <= qualities[1] + 1e-12


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.01, 0.99))
def test_without_its_largest_step_a_plan_of_one_tier_falls_short(seed: int, share: float) -> None:
    """Not more than one step beyond the shortfall: what is freed too much is less than one node's part of it."""
    nodes = _forest(MENU, seed)
    demand = max(1, int(share * sum(node.num_bytes for node in nodes)))
    plan = _policy(nodes).plan(Tier.GPU, demand)
    freed = [decision.freed_bytes for decision in plan]
    assert sum(freed) >= demand
    assert sum(freed) - max(freed) < demand


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 0.95))
def test_the_loss_is_within_one_step_of_the_best_of_all_choices(seed: int, share: float) -> None:
    """All combinations of four nodes, by brute force; one change of one node is the most that the greedy misses by."""
    nodes = _forest(MENU, seed, most=4, trees=False)
    planner = _policy(nodes)
    assert isinstance(planner.policy, EvicPressPolicy)
    demand = max(1, int(share * sum(node.num_bytes for node in nodes)))
    loss = _loss(planner, demand)
    changes: list[list[tuple[int, float]]] = []
    for node in nodes:
        states = [(0, 0.0)]
        for form, quality in zip(MENU.forms[1:], node.curve[1:], strict=True):
            states.append((node.num_bytes - MENU.num_bytes(form, node.num_tokens), node.weight * (1.0 - quality)))
        prefill_s = COSTS.prefill.marginal_seconds(node.num_tokens, node.depth_tokens)
        changes.append([*states, (node.num_bytes, node.weight * prefill_s)])
    best = min(
        sum(lost for _, lost in chosen)
        for chosen in itertools.product(*changes)
        if sum(freed for freed, _ in chosen) >= demand
    )
    largest = max(lost for states in changes for _, lost in states)
    assert best - 1e-9 <= loss <= best + largest + 1e-9


@pytest.mark.parametrize("demand", [0, -5])
def test_no_demand_needs_no_plan(demand: int) -> None:
    assert _policy([make_node(1, menu=MENU)]).plan(Tier.GPU, demand) == []
