"""Losses of plans in comparable seconds, the bytes they would have copied, and how many wait for a computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import DROP, EXACT, Decision, Form, LowerCopy, Option, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.wait_cost import Congestion, copies_to_make, is_wasteful, seconds_lost

HALF = Form("keydiff", 0.5)
COSTS = CostSnapshot(
    PrefillCost(1.0, 0.01, 0.0), {Tier.HOST: TransferCost(0.5, 1e4), Tier.SSD: TransferCost(0.5, 1e3)}, {}
)
ON_GPU = Option(EXACT, Tier.GPU, 100)


def decision(node_id: int, option: Option, loss: float = 0.0, source: Option = ON_GPU) -> Decision:
    return Decision(node_id, source, option, source.num_bytes, loss=loss)


def test_the_utility_lost_is_in_units_of_one_certain_use() -> None:
    planner = make_planner("evicpress", Menu((), (Tier.GPU,)), alpha=1.0, costs=COSTS)
    plan = [decision(1, DROP, 6.0), decision(2, Option(HALF, Tier.GPU, 50), -2.0)]
    assert seconds_lost(plan, planner, COSTS, 8.0) == pytest.approx(0.5)
    assert seconds_lost([], planner, COSTS, 8.0) == 0.0


def test_of_a_policy_without_utility_what_is_dropped_counts_without_the_fixed_cost() -> None:
    menu = Menu((), (Tier.GPU, Tier.HOST))
    planner = make_planner("lru", menu, alpha=1.0, costs=COSTS)
    planner.add_all([make_node(1, menu=menu, tokens=30), make_node(2, menu=menu, tokens=50)])
    plan = [decision(1, DROP, 1e9), decision(2, Option(EXACT, Tier.HOST, 100))]
    assert seconds_lost(plan, planner, COSTS, 8.0) == pytest.approx(0.3)


def test_only_what_leaves_the_gpu_for_a_copy_that_is_not_there_is_copied() -> None:
    plan = [
        decision(1, DROP),
        decision(2, Option(HALF, Tier.GPU, 50)),
        decision(3, Option(EXACT, Tier.HOST, 100)),
        decision(4, Option(EXACT, Tier.HOST, 70)),
        decision(5, Option(HALF, Tier.SSD, 50)),
        decision(6, Option(EXACT, Tier.SSD, 100), source=Option(EXACT, Tier.HOST, 100)),
    ]
    lower_copies_of = {
        4: (LowerCopy(Tier.HOST, EXACT, 70, 1.0),),
        5: (LowerCopy(Tier.SSD, EXACT, 100, 1.0), LowerCopy(Tier.HOST, HALF, 50, 0.9)),
    }
    assert copies_to_make(plan, lower_copies_of) == (2, 100 + 50)


@pytest.mark.parametrize(("num_bytes", "is_forced", "wastes"), [(3, True, True), (3, False, False), (400, True, False)])
def test_a_plan_is_wasteful_that_loses_more_tokens_than_it_frees_slots(
    num_bytes: int, is_forced: bool, wastes: bool
) -> None:
    menu = Menu((), (Tier.GPU, Tier.SSD))
    planner = make_planner("lru", menu, alpha=1.0, costs=COSTS)
    planner.add_all([make_node(1, menu=menu), make_node(2, 1, menu=menu, tokens=300, depth=100, tier=Tier.SSD)])
    below = decision(2, DROP, source=Option(EXACT, Tier.SSD, 300))
    plan = [replace(below, is_forced=is_forced), decision(1, DROP, source=Option(EXACT, Tier.GPU, num_bytes))]
    assert is_wasteful(plan, planner) == wastes
    assert not is_wasteful([], planner)


def test_a_part_of_a_path_pays_what_is_its_own() -> None:
    part = COSTS.of_a_part()
    assert part.load_seconds(Tier.HOST, 1e4) == pytest.approx(1.0)
    assert part.load_seconds(Tier.SSD, 1e3) == COSTS.load_seconds(Tier.SSD, 1e3) == pytest.approx(1.5)
    assert part.prefill is COSTS.prefill


# Congestion.


def test_congestion_is_the_mean_number_of_requests_that_a_second_of_computing_delays() -> None:
    congestion = Congestion()
    assert congestion.value == 1.0
    for step in range(1000):
        congestion.observe(step / 10, 4 if step % 2 else 0)
    assert congestion.value == pytest.approx(3.0, abs=0.05)


def test_congestion_is_forgotten_when_nobody_waits_any_more() -> None:
    congestion = Congestion()
    congestion.observe(0.0, 0)
    congestion.observe(100.0, 5)
    assert congestion.value == pytest.approx(6.0, abs=0.01)
    congestion.observe(100.0 + Congestion.MEMORY_S, 0)
    assert 1.0 < congestion.value < 3.0
    congestion.observe(500.0, 0)
    assert congestion.value == pytest.approx(1.0, abs=1e-6)


def test_congestion_has_a_limit_and_no_time_that_goes_back() -> None:
    congestion = Congestion()
    congestion.observe(10.0, 0)
    congestion.observe(5.0, 1000)
    assert congestion.value == 1.0
    congestion.observe(1000.0, 1000)
    assert congestion.value == pytest.approx(Congestion.MOST)


def test_recomputing_weighs_more_and_loading_does_not() -> None:
    costs = CostSnapshot(PrefillCost(0.1, 1e-3, 1e-7), {Tier.HOST: TransferCost(1e-3, 1e9)}, {})
    weighed = costs.with_recompute_weight(3.0)
    assert weighed.prefill.seconds(100, 1000) == pytest.approx(3.0 * costs.prefill.seconds(100, 1000))
    assert weighed.load == costs.load
