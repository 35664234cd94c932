"""Fixed press + lru, impress and adaptcache: the rivals that compress."""

from __future__ import annotations

import math

import pytest
from tests.unit.policy.nodes import execute, make_node

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy import Planner, make_planner, policy_info
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.fixed import grown_fraction, impress_form

K50, K20, V50 = Form("keydiff", 0.5), Form("keydiff", 0.2), Form("knorm", 0.5)
TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
MENU = Menu((K50, K20, V50), TIERS)
COSTS = CostSnapshot(
    PrefillCost(0.0, 1.0, 0.0), {Tier.HOST: TransferCost(9.0, 100.0), Tier.SSD: TransferCost(9.0, 10.0)}, {}
)
ROOMY = {Tier.HOST: 10**6, Tier.SSD: 10**6}


def _moves(planner: Planner, num_bytes: int, room: dict[Tier, int], tier: Tier = Tier.GPU) -> list[tuple[int, str]]:
    return [(decision.node_id, str(decision.option)) for decision in planner.plan(tier, num_bytes, room)]


# fixed press + lru


def _fixed() -> Planner:
    return make_planner("keydiff@0.5+lru", MENU, alpha=1.0, costs=COSTS)


def test_fixed_compresses_least_recently_used_first() -> None:
    planner = _fixed()
    for node_id, last_use in ((1, 3), (2, 1), (3, 2)):
        planner.add(make_node(node_id, menu=MENU, last_use=last_use))
    assert _moves(planner, 100, ROOMY) == [(2, "keydiff@0.5/gpu"), (3, "keydiff@0.5/gpu")]


def test_fixed_compresses_all_before_it_demotes_any() -> None:
    planner = _fixed()
    for node_id in range(5):
        planner.add(make_node(node_id, menu=MENU, last_use=node_id, hits=9 - node_id))
    steps: list[tuple[int, str]] = []
    while planner.index.num_bytes[Tier.GPU]:
        plan = planner.plan(Tier.GPU, 1, ROOMY)
        steps += [(decision.node_id, str(decision.option)) for decision in plan]
        execute(planner, plan)
    assert steps == [
        *((node_id, "keydiff@0.5/gpu") for node_id in range(5)),
        *((node_id, "keydiff@0.5/host") for node_id in range(5)),
    ]


def test_fixed_does_both_to_a_node_in_one_plan_if_it_must() -> None:
    planner = _fixed()
    planner.add(make_node(1, menu=MENU, last_use=1))
    planner.add(make_node(2, menu=MENU, last_use=2))
    assert _moves(planner, 150, ROOMY) == [(1, "keydiff@0.5/host"), (2, "keydiff@0.5/gpu")]


def test_fixed_compresses_on_lower_tiers_too() -> None:
    planner = _fixed()
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST, last_use=9))
    planner.add(make_node(2, menu=MENU, tier=Tier.HOST, form=K50, last_use=1))
    assert _moves(planner, 1, ROOMY, Tier.HOST) == [(1, "keydiff@0.5/host")]
    assert _moves(planner, 51, ROOMY, Tier.HOST) == [(2, "keydiff@0.5/ssd"), (1, "keydiff@0.5/host")]


def test_fixed_leaves_other_forms_and_tiny_nodes_as_they_are() -> None:
    planner = _fixed()
    planner.add(make_node(1, menu=MENU, form=V50, last_use=1))
    planner.add(make_node(2, menu=MENU, tokens=1, last_use=2))
    assert _moves(planner, 51, ROOMY) == [(1, "knorm@0.5/host"), (2, "exact/host")]


def test_fixed_compresses_nothing_twice() -> None:
    menu = Menu((K50, Form("keydiff", 0.8)), TIERS)
    planner = make_planner("keydiff@0.5+lru", menu, alpha=1.0, costs=COSTS)
    planner.add(make_node(1, menu=menu, form=Form("keydiff", 0.8)))
    assert _moves(planner, 1, ROOMY) == [(1, "keydiff@0.8/host")]


def test_a_form_that_is_not_on_the_menu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"form snapkv@0.5 is not on the menu: expected one of .*keydiff@0.5"):
        make_planner("snapkv@0.5+lru", MENU, alpha=1.0, costs=COSTS)


# impress


@pytest.mark.parametrize(
    ("important", "chunk", "run", "expected"),
    [
        (0.1, 1, 16.0, 0.1),  # a chunk of one token: nothing rides along
        (0.1, 64, 1 / 0.9, 1 - 0.9**64),  # tokens at random
        (0.5, 2, 4.0, 1 - 0.5 * 0.75),  # after an unimportant token an important one with 0.5 / (4 * 0.5) = 1 / 4
        (0.1, 64, 16.0, 1 - 0.9 * (1 - 0.1 / (16 * 0.9)) ** 63),
    ],
)
def test_the_grown_fraction_by_hand(important: float, chunk: int, run: float, expected: float) -> None:
    assert grown_fraction(important, chunk, run) == pytest.approx(expected, rel=1e-12)


def test_longer_runs_let_fewer_tokens_ride_along() -> None:
    grown = [grown_fraction(0.1, 64, run) for run in (2.0, 8.0, 32.0, 1e9)]
    assert grown == sorted(grown, reverse=True)
    assert grown[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("important", [0.0, 1.0, -0.1, math.nan])
def test_an_important_fraction_out_of_range_is_refused(important: float) -> None:
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        grown_fraction(important)


def test_chunks_and_runs_below_a_token_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks of 0 and runs of 16 tokens: expected at least 1 each"):
        grown_fraction(0.1, 0)


def test_impress_keeps_the_grown_fraction_then_demotes() -> None:
    (form,) = policy_info("impress@0.1").forms
    assert form == impress_form(0.1) == Form("snapkv", 0.42)
    menu = Menu((form,), TIERS)
    planner = make_planner("impress@0.1", menu, alpha=1.0, costs=COSTS)
    assert planner.name == "impress@0.1"
    planner.add(make_node(1, menu=menu, last_use=1))
    planner.add(make_node(2, menu=menu, last_use=2))
    assert _moves(planner, 117, ROOMY) == [(1, "snapkv@0.42/host"), (2, "snapkv@0.42/gpu")]


def test_impress_never_keeps_everything() -> None:
    assert impress_form(0.9) == Form("snapkv", 0.999)


# adaptcache


def _adaptcache(alpha: float = 10.0) -> Planner:
    assert MENU.forms[1:] == (K50, V50, K20)
    return make_planner("adaptcache", MENU, alpha=alpha, costs=COSTS, mean_curve=[1.0, 0.9, 0.8, 0.4])


def test_adaptcache_computes_the_printed_utility() -> None:
    planner = _adaptcache()
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST, hits=3, weight=0.5))
    (decision,) = planner.plan(Tier.HOST, 1, ROOMY)
    # Held: 3 * (10 * 1.0) - 100 / 100 = 29. keydiff@0.5: 27 - 0.5, drop 2.5 / 50 B; knorm@0.5: 24 - 0.5, 5.5 / 50 B;
    # keydiff@0.2: 12 - 0.2, 17.2 / 80 B; the SSD: 30 - 10, 9 / 100 B.
    assert str(decision.option) == "keydiff@0.5/host"
    assert decision.loss == pytest.approx(2.5)
    assert (decision.delay_before_s, decision.delay_s) == pytest.approx((1.0, 0.5))


def test_adaptcache_drops_with_utility_zero_from_the_last_tier() -> None:
    planner = _adaptcache()
    planner.add(make_node(1, menu=MENU, tier=Tier.SSD, hits=1))
    (decision,) = planner.plan(Tier.SSD, 1)
    # Held: 10 - 10 = 0, so to drop loses 0; keydiff@0.5: 9 - 5 gains 4 over 50 B, keydiff@0.2: 4 - 2 gains 2 over 80 B.
    assert str(decision.option) == "keydiff@0.5/ssd"
    assert decision.loss == pytest.approx(-4.0)
    planner = _adaptcache(alpha=0.0)
    planner.add(make_node(1, menu=MENU, tier=Tier.SSD, form=K20))
    (decision,) = planner.plan(Tier.SSD, 1)
    assert str(decision.option) == "drop"
    assert decision.loss == pytest.approx(-2.0)


def test_the_delay_is_not_multiplied_by_the_frequency() -> None:
    """To the SSD from the host costs 9 s whatever the hits: with 30 hits compressing costs 10 times as much."""
    planner = _adaptcache()
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST, hits=30))
    (decision,) = planner.plan(Tier.HOST, 1, ROOMY)
    assert str(decision.option) == "exact/ssd"
    assert decision.loss == pytest.approx(9.0)


def test_adaptcache_chooses_by_the_offline_curve_and_reports_the_nodes_own() -> None:
    planner = _adaptcache()
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST, hits=3, curve=[1.0, 0.1, 1.0, 0.1]))
    (decision,) = planner.plan(Tier.HOST, 1, ROOMY)
    assert str(decision.option) == "keydiff@0.5/host"
    assert decision.quality == 0.1


def test_adaptcache_takes_the_least_drop_per_byte_first() -> None:
    planner = _adaptcache()
    planner.add(make_node(1, menu=MENU, tier=Tier.HOST, hits=5, last_use=1))
    planner.add(make_node(2, menu=MENU, tier=Tier.HOST, hits=2, last_use=9))
    assert _moves(planner, 1, ROOMY, Tier.HOST) == [(2, "keydiff@0.5/host")]
    planner.touch(2, 1.0, 9, 10)
    assert _moves(planner, 1, ROOMY, Tier.HOST) == [(1, "keydiff@0.5/host")]


def test_a_use_counts_at_once_where_compressing_is_said_to_help() -> None:
    planner = make_planner("adaptcache", MENU, alpha=1.0, costs=COSTS, mean_curve=[0.5, 1.0, 1.0, 1.0])
    planner.add(make_node(1, menu=MENU, hits=1))
    planner.add(make_node(2, menu=MENU, hits=2))
    assert _moves(planner, 1, ROOMY) == [(2, "keydiff@0.5/gpu")]
    planner.touch(1, 1.0, 3, 1)
    assert _moves(planner, 1, ROOMY) == [(1, "keydiff@0.5/gpu")]


@pytest.mark.parametrize("curve", [[1.0], [1.0, 0.9, 0.8, 1.1], [1.0, 0.9, 0.8, math.nan]])
def test_a_bad_offline_curve_is_refused(curve: list[float]) -> None:
    with pytest.raises(ValueError, match=r"expected 4 qualities in \[0, 1\]"):
        make_planner("adaptcache", MENU, alpha=1.0, costs=COSTS, mean_curve=curve)


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_a_bad_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number, 0 or more"):
        _adaptcache(alpha)
