"""Forms with a codec: raw on the GPU, fewer bytes below it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.nodes import assert_closed, execute, make_node, random_forest

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.policy import Planner, make_planner, policy_info
from sglang_evicpress.policy.base import Candidate, lower_bytes, lower_forms, smaller_forms
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.promotion import Budget
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

HALF, INT4, HALF4 = Form("keydiff", 0.5), Form(codec="int4"), Form("keydiff", 0.5, "int4")
LOSSLESS = Form(codec="lossless")
TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
MENU = Menu((HALF, INT4, HALF4), TIERS, slot_bytes=16)
COSTS = CostSnapshot(
    PrefillCost(0.0, 0.01, 0.0), {Tier.HOST: TransferCost(0.0, 1e5), Tier.SSD: TransferCost(0.0, 1e4)}, {}
)
ROOM = {Tier.HOST: 10**9, Tier.SSD: 10**9}


def planner_of(name: str, *nodes: object, menu: Menu = MENU, alpha: float = 1.0) -> Planner:
    planner = make_planner(name, menu, alpha=alpha, costs=COSTS)
    planner.add_all(nodes)
    return planner


def test_sizes_are_raw_on_the_gpu_and_stored_below() -> None:
    assert MENU.forms == (EXACT, HALF, INT4, HALF4)
    assert MENU.sizes(64) == (1024, 512, 1024, 512) and MENU.sizes(64, 0, Tier.SSD) == (1024, 512, 320, 160)
    assert MENU.stored_bytes(INT4, 1024) == 320 and MENU.of_codec("int4") == 0b1100


def test_a_node_shrinks_on_the_gpu_by_presses_alone_and_goes_down_in_any_form() -> None:
    exact = Candidate(make_node(1, menu=MENU, tokens=64))
    assert smaller_forms(MENU, exact) == [(1, 512)] and lower_bytes(MENU, exact) == 1024
    assert lower_forms(MENU, exact) == [(1, 512), (2, 320), (3, 160)]
    decoded = Candidate(make_node(1, menu=MENU, tokens=64, form=INT4))
    assert smaller_forms(MENU, decoded) == [(3, 512)] and lower_bytes(MENU, decoded) == 320
    below = Candidate(make_node(1, menu=MENU, tokens=64, tier=Tier.HOST))
    assert smaller_forms(MENU, below) == [(1, 512), (2, 320), (3, 160)] == lower_forms(MENU, below)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("exact+int4+lru", [(1, "exact+int4/host", 320)]),
        ("keydiff@0.5+int4+lru", [(1, "keydiff@0.5/gpu", 512), (2, "keydiff@0.5/gpu", 512)]),
    ],
)
def test_fixed_forms_are_encoded_on_the_way_down(name: str, moves: list[tuple[int, str, int]]) -> None:
    nodes = [make_node(i, menu=MENU, tokens=64, last_use=i) for i in (1, 2)]
    plan = planner_of(name, *nodes).plan(Tier.GPU, 1024, ROOM)
    assert [(one.node_id, str(one.option), one.option.num_bytes) for one in plan] == moves
    pressed = [make_node(i, menu=MENU, tokens=64, last_use=i, form=HALF) for i in (1, 2)]
    (down,) = planner_of("keydiff@0.5+int4+lru", *pressed).plan(Tier.GPU, 512, ROOM)
    assert (str(down.option), down.option.num_bytes, down.freed_bytes) == ("keydiff@0.5+int4/host", 160, 512)
    unable = replace(pressed[0], allowed_forms=0)
    (down,) = planner_of("keydiff@0.5+int4+lru", unable).plan(Tier.GPU, 512, ROOM)
    assert (str(down.option), down.option.num_bytes) == ("keydiff@0.5/host", 512)


def test_room_below_is_what_the_codec_leaves() -> None:
    nodes = [make_node(i, menu=MENU, tokens=64, last_use=i) for i in range(3)]
    plan = planner_of("exact+int4+lru", *nodes).plan(Tier.GPU, 3 * 1024, {Tier.HOST: 640, Tier.SSD: 320})
    assert [str(one.option) for one in plan] == ["exact+int4/ssd", "exact+int4/host", "exact+int4/host"]


def test_evicpress_sends_a_node_down_in_fewer_bytes_where_that_is_worth_it() -> None:
    node = make_node(1, menu=MENU, tokens=640, curve=(1.0, 0.5, 0.99, 0.45))  # 10,240 bytes: 1 s from the SSD
    only_ssd = {Tier.SSD: 10**9}
    (down,) = planner_of("evicpress", node).plan(Tier.GPU, 10240, only_ssd)
    assert str(down.option) == "exact+int4/ssd" and down.delay_s == pytest.approx(0.32)
    (down,) = planner_of("evicpress", node, alpha=100.0).plan(Tier.GPU, 10240, only_ssd)
    assert str(down.option) == "exact/ssd"
    told = planner_of("evicpress", node).explain(1)
    sizes = {row["option"]: row["num_bytes"] for row in told["options"]}
    assert sizes["exact+int4/ssd"] == 3200 and sizes["exact/ssd"] == 10240 and "exact+int4/gpu" not in sizes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_nodes_at_once_are_weighed_as_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    nodes = random_forest(draw, MENU, draw.randint(1, 20), tiers=(0, 1, 2), tokens=(1, 300))
    policy = EvicPressPolicy(MENU, draw.choice([0.1, 1.0, 10.0]), COSTS)
    for node in nodes:
        one, other = Candidate(node), Candidate(node)
        policy.prepare([one])
        step, same = policy.step(one), policy.step(other)
        assert (step is None) == (same is None)
        if step is not None and same is not None:
            assert step[1:4] == same[1:4] and step.key == pytest.approx(same.key, rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["evicpress", "exact+int4+lru", "keydiff@0.5+int4+lru"]))
def test_no_tier_gets_more_than_it_has_room_for(seed: int, name: str) -> None:
    draw = random.Random(seed)
    nodes = random_forest(draw, MENU, draw.randint(1, 20), tiers=(0, 1, 2), tokens=(1, 80))
    planner = planner_of(name, *nodes)
    held, room = list(planner.index.num_bytes), {tier: draw.randint(0, 2000) for tier in TIERS[1:]}
    demand = draw.randint(1, 1 + held[0])
    for decision in planner.plan(Tier.GPU, demand, room):
        execute(planner, [decision])
        assert_closed(planner)
    for tier, free in room.items():
        assert planner.index.num_bytes[tier] <= held[tier] + free
    assert held[0] - planner.index.num_bytes[0] >= min(demand, held[0])


@pytest.mark.parametrize(
    ("text", "form"), [("exact", EXACT), ("keydiff@0.5", HALF), (" exact+int4 ", INT4), ("keydiff@0.5+int4", HALF4)]
)
def test_forms_with_a_codec_are_read_as_they_are_written(text: str, form: Form) -> None:
    assert Form.parse_stored(text) == form == Form.parse_stored(str(form)) and form.pressed.codec == "raw"


@pytest.mark.parametrize("text", ["exact+", "exact+raw", "exact+int3", "int4", "keydiff@0.5+int4+int4", "+int4"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Form.parse_stored(text)
    with pytest.raises(ValueError, match="is not known: expected one of"):
        policy_info(f"{text}+lru")


def test_a_codec_that_loses_nothing_is_exact_and_leaves_no_trace_on_the_gpu() -> None:
    half = Form("keydiff", 0.5, "lossless")
    menu = Menu((HALF, LOSSLESS, INT4), TIERS, slot_bytes=64)
    assert menu.forms == (EXACT, LOSSLESS, HALF, INT4)
    assert menu.sizes(64)[:2] == (4096, 4096) and menu.sizes(64, 0, Tier.SSD)[:2] == (4096, 3136)
    assert LOSSLESS.is_exact and not half.is_exact and not half.has_lossy_codec
    assert (LOSSLESS.decoded, half.decoded, INT4.decoded) == (EXACT, HALF, INT4)
    assert menu.smaller(LOSSLESS) == menu.everything
    curves = Curves.from_json({"keydiff": {"0.5": 0.9}})
    assert curves.quality(LOSSLESS) == 1.0 and curves.quality(half) == 0.9 and curves.knows(half)
    node = make_node(1, menu=menu, tokens=64)
    (down,) = planner_of("exact+lossless+lru", node, menu=menu).plan(Tier.GPU, 4096, ROOM)
    assert (str(down.option), down.option.num_bytes, down.quality) == ("exact+lossless/host", 3136, 1.0)
    below = replace(make_node(1, menu=menu, tokens=64, tier=Tier.HOST, form=LOSSLESS), allowed_forms=0)
    (up,) = planner_of("evicpress", below, menu=menu).plan_promotions({Tier.GPU: 10**6}, Budget(10**6, 1e6))
    assert (str(up.source), str(up.option), up.option.num_bytes) == ("exact+lossless/host", "exact/gpu", 4096)
