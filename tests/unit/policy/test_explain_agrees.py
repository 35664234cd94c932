"""The table of ``explain`` and the step that is taken are the same thing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import Form, NodeStats, Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu

MENU = Menu(tuple(Form("keydiff", kept) for kept in (0.8, 0.5, 0.2)), (Tier.GPU, Tier.HOST))
COSTS = CostSnapshot(PrefillCost(0.0, 0.01, 0.0), {Tier.HOST: TransferCost(0.0, 1e3)}, {})

MakeNode = Callable[..., NodeStats]


def _policy(alpha: float = 1.0) -> Planner:
    return make_planner("evicpress", MENU, alpha=alpha, costs=COSTS)


def _rows(told: dict[str, object]) -> list[dict[str, object]]:
    rows = told["options"]
    assert isinstance(rows, list)
    return rows


def test_the_table_by_hand(make_node: MakeNode) -> None:
    planner = _policy()
    planner.add(make_node(1, menu=MENU, curve=(1.0, 0.99, 0.915, 0.4), weight=2.0))
    told = planner.explain(1)
    rows = {row["option"]: row for row in _rows(told)}
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


def test_a_locked_node_and_a_parent_say_why_they_stay(make_node: MakeNode) -> None:
    planner = _policy()
    smallest = Form("keydiff", 0.2)
    planner.add(make_node(1, menu=MENU, form=smallest))
    planner.add(make_node(2, 1, menu=MENU, is_locked=True))
    assert (planner.explain(2)["next"], planner.explain(2)["why"]) == (None, "locked by a running request")
    told = planner.explain(1)
    assert told["next"] is None
    assert "only once its children have" in str(told["why"])
    assert {row["role"] for row in _rows(told)} == {"held", "a child is above"}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), alpha=st.sampled_from((0.0, 0.5, 1.0, 5.0)))
def test_the_table_agrees_with_the_step_that_is_taken(seed: int, alpha: float, make_node: MakeNode) -> None:
    draw, planner = random.Random(seed), _policy(alpha)
    curve = (1.0, *(round(draw.random(), 2) for _ in MENU.forms[1:]))
    tier = Tier(draw.randrange(2))
    planner.add(
        make_node(1, menu=MENU, tokens=draw.randint(1, 300), tier=tier, form=draw.choice(MENU.forms), curve=curve)
    )
    if draw.random() < 0.3:
        planner.add(make_node(2, 1, menu=MENU, tier=Tier(max(tier, draw.randrange(2))), curve=curve))
    told = planner.explain(1)
    candidate = planner.index.candidates[1]
    step = planner.policy.step(candidate)
    assert (step is None) == (told["next"] is None)
    if step is None:
        return
    (chosen,) = [row for row in _rows(told) if row["role"] == "next"]
    assert chosen["option"] == told["next"]
    assert (chosen["num_bytes"], chosen["q"]) == (step.num_bytes, step.quality)
    assert chosen["d"] == pytest.approx(step.delay_s)
    assert chosen["drop_per_byte"] == pytest.approx(step.key)
    # No option of the table that is allowed loses less per byte.
    allowed = [row for row in _rows(told) if row["role"] != "a child is above" and row["drop_per_byte"] is not None]
    assert min(float(str(row["drop_per_byte"])) for row in allowed) == pytest.approx(step.key)


def test_a_policy_that_weighs_nothing_tells_its_key(make_node: MakeNode) -> None:
    planner = make_planner("lru", MENU, alpha=1.0, costs=COSTS)
    planner.add(make_node(1, menu=MENU, last_use=7))
    told = planner.explain(1)
    assert (told["key"], told["options"], told["next"]) == (7.0, [], "exact/host")
