"""The table of a node's options: each row follows from q, d and the weight, and the next step is what a plan takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner

MakeNode = Callable[..., NodeStats]
MENU = Menu((Form("keydiff", 0.8), Form("keydiff", 0.5), Form("keydiff", 0.2)))
COSTS = CostSnapshot(PrefillCost(0.0, 1e-3, 0.0), {}, {})


def policy_with(node: NodeStats, name: str = "evicpress") -> Planner:
    planner = make_planner(name, MENU, alpha=2.0, costs=COSTS, mean_curve=node.curve)
    planner.add(node)
    return planner


@pytest.mark.parametrize("value_of_hit", [1.0, 2.0**40])
def test_every_row_is_utility_by_hand_in_hits_of_now(make_node: MakeNode, value_of_hit: float) -> None:
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


def test_the_next_step_is_what_a_plan_takes_and_explaining_changes_nothing(make_node: MakeNode) -> None:
    planner = policy_with(make_node(7, menu=MENU, tokens=200, curve=(1.0, 0.97, 0.9, 0.3)))
    before = planner.plan(Tier.GPU, 200)
    assert planner.explain(7, 2.0**40)["next"] == str(before[0].option)
    assert planner.plan(Tier.GPU, 200) == before


def test_a_locked_node_and_a_policy_without_utility(make_node: MakeNode) -> None:
    locked = policy_with(make_node(7, menu=MENU, is_locked=True)).explain(7)
    assert (locked["next"], locked["why"]) == (None, "locked by a running request")
    plain = policy_with(make_node(7, menu=MENU, last_use=5), "lru").explain(7, 4.0)
    assert (plain["next"], plain["key"], plain["options"]) == ("drop", 5.0, [])
    with pytest.raises(KeyError):
        policy_with(make_node(7, menu=MENU)).explain(8)
