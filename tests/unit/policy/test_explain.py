"""The table of a node's options: each row follows from q, d and the weight, and the next step is what a plan takes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import Form, LowerCopy, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner

MENU = Menu((Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2)))
COSTS = CostSnapshot(PrefillCost(0.0, 1e-3, 0.0), {}, {})
TWO_TIERS = Menu(MENU.forms, (Tier.GPU, Tier.HOST))
SLOW = CostSnapshot(PrefillCost(0.0, 0.01, 0.0), {Tier.HOST: TransferCost(0.0, 1e3)}, {})


def policy_with(node: NodeStats) -> Planner:
    planner = make_planner("evicpress", MENU, alpha=2.0, costs=COSTS, mean_curve=node.curve)
    planner.add(node)
    return planner


@pytest.mark.parametrize("value_of_hit", [1.0, 2.0**40])
def test_every_row_is_utility_by_hand_in_hits_of_now(value_of_hit: float) -> None:
    node = make_node(7, menu=MENU, tokens=200, curve=(1.0, 0.97, 0.9, 0.3), weight=3.0 * value_of_hit)
    told: Any = policy_with(node).explain(7, value_of_hit)
    assert told["weight"] == 3.0
    assert [row["option"] for row in told["options"]] == [
        *("exact/gpu", "keydiff@0.8/gpu", "keydiff@0.5/gpu", "keydiff@0.2/gpu", "drop"),
    ]
    held = told["options"][0]
    for row in told["options"]:
        assert row["U"] == pytest.approx(3.0 * (2.0 * row["q"] - row["d"]))
        if row["freed_bytes"]:
            assert row["drop_per_byte"] == pytest.approx((held["U"] - row["U"]) / row["freed_bytes"])
    assert [row["d"] for row in told["options"]] == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.2])
    (chosen,) = (row for row in told["options"] if row["role"] == "next")
    assert told["next"] == chosen["option"] and told["key"] == pytest.approx(chosen["drop_per_byte"])


def _policy(alpha: float = 1.0, name: str = "evicpress") -> Planner:
    return make_planner(name, TWO_TIERS, alpha=alpha, costs=SLOW)


def test_the_table_by_hand() -> None:
    planner = _policy()
    planner.add(make_node(1, menu=TWO_TIERS, curve=(1.0, 0.99, 0.915, 0.4), weight=2.0))
    told: Any = planner.explain(1)
    rows = {row["option"]: row for row in told["options"]}
    assert told["next"] == "keydiff@0.8/gpu"
    assert rows["keydiff@0.8/gpu"]["role"] == "next"
    assert rows["keydiff@0.8/gpu"]["drop_per_byte"] == pytest.approx(2.0 * 0.01 / 20)
    assert rows["keydiff@0.5/gpu"]["role"] == "LP-dominated"
    assert rows["keydiff@0.2/gpu"]["role"] == "dominated"
    assert rows["exact/gpu"]["role"] == "held"
    # Off the GPU: exact on the host, 0.1 s; a drop costs 1 s, and what is lossy there more in quality than in time.
    assert (rows["exact/host"]["role"], rows["exact/host"]["d"]) == (
        "dominated by a better way out",
        pytest.approx(0.1),
    )
    assert rows["keydiff@0.8/host"]["role"] == "hull"
    assert (rows["drop"]["q"], rows["drop"]["d"], rows["drop"]["num_bytes"]) == (1.0, pytest.approx(1.0), 0)


def test_what_a_lower_tier_has_already_stands_in_the_table_once() -> None:
    planner, curve = _policy(), (1.0, 0.99, 0.5, 0.1)
    node = make_node(1, menu=TWO_TIERS, curve=curve)
    copy = LowerCopy(Tier.HOST, MENU.forms[1], TWO_TIERS.num_bytes(MENU.forms[1], 100), 0.99)
    planner.add(replace(node, lower_copies=(copy,)))
    told: Any = planner.explain(1)
    options = [row["option"] for row in told["options"]]
    assert len(options) == len(set(options)) and "keydiff@0.8/host" in options
    assert [row["option"] for row in told["options"] if row["role"] == "next"] == [told["next"]]


def test_a_locked_node_and_a_parent_say_why_they_stay() -> None:
    planner = _policy()
    smallest = Form("keydiff", 0.2)
    planner.add(make_node(1, menu=TWO_TIERS, form=smallest))
    planner.add(make_node(2, 1, menu=TWO_TIERS, is_locked=True))
    assert (planner.explain(2)["next"], planner.explain(2)["why"]) == (None, "locked by a running request")
    told: Any = planner.explain(1)
    assert told["next"] is None
    assert "only once its children have" in str(told["why"])
    assert {row["role"] for row in told["options"]} == {"held", "a child is above"}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), alpha=st.sampled_from((0.0, 0.5, 1.0, 5.0)))
def test_the_table_agrees_with_the_step_that_is_taken(seed: int, alpha: float) -> None:
    draw, planner = random.Random(seed), _policy(alpha)
    curve = (1.0, *(round(draw.random(), 2) for _ in MENU.forms[1:]))
    tier = Tier(draw.randrange(2))
    planner.add(
        make_node(1, menu=TWO_TIERS, tokens=draw.randint(1, 300), tier=tier, form=draw.choice(MENU.forms), curve=curve)
    )
    if draw.random() < 0.3:
        planner.add(make_node(2, 1, menu=TWO_TIERS, tier=Tier(max(tier, draw.randrange(2))), curve=curve))
    told: Any = planner.explain(1)
    candidate = planner.index.candidates[1]
    step = planner.policy.step(candidate)
    assert (step is None) == (told["next"] is None)
    if step is None:
        return
    (chosen,) = [row for row in told["options"] if row["role"] == "next"]
    assert chosen["option"] == told["next"]
    assert (chosen["num_bytes"], chosen["q"]) == (step.num_bytes, step.quality)
    assert chosen["d"] == pytest.approx(step.delay_s)
    if step.key == math.inf:
        assert "comes last" in told["why"] and candidate.lowest_tier <= tier
        return
    assert chosen["drop_per_byte"] == pytest.approx(step.key)
    # No option of the table that is allowed loses less per byte.
    closed = ("a child is above", "worth less than a drop")
    allowed = [row for row in told["options"] if row["role"] not in closed and row["drop_per_byte"] is not None]
    assert min(float(str(row["drop_per_byte"])) for row in allowed) == pytest.approx(step.key)


def test_a_policy_that_weighs_nothing_tells_its_key() -> None:
    planner = _policy(name="lru")
    planner.add(make_node(1, menu=TWO_TIERS, last_use=7))
    told: Any = planner.explain(1)
    assert (told["key"], told["options"], told["next"]) == (7.0, [], "exact/host")
    with pytest.raises(KeyError):
        planner.explain(8)
