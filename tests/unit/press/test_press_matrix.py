"""Requirements on every press, over every kind of node it may meet."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.unit.geometry.made import make_geometry

from sglang_evicpress import core
from sglang_evicpress.press import get_press, select
from sglang_evicpress.press.band_lengths import BandLengthsPress
from sglang_evicpress.press.geometry import GeometryPress
from sglang_evicpress.press.random import Random
from sglang_evicpress.press.snapkv import SnapKV

ALL = {
    **{name: get_press(name) for name in core.PRESSES},
    "geometry": GeometryPress(make_geometry()),
    "band_lengths": BandLengthsPress(make_geometry()),
    "snapkv-avg": SnapKV(kernel_size=5, pooling="avg"),
    "snapkv-short": SnapKV(window=3, kernel_size=1),
    "random-7": Random(seed=7),
}
NODES = {
    "exact": {"num_tokens": 100},
    "exact-pages": {"num_tokens": 96, "page_size": 16},
    "later": {"num_tokens": 64, "start": 128, "page_size": 16},
    "starts-among-sinks": {"num_tokens": 40, "start": 2},
    "compressed": {"num_tokens": 100, "num_slots": 37},
    "compressed-pages": {"num_tokens": 96, "num_slots": 48, "page_size": 16},
    "compressed-later": {"num_tokens": 96, "num_slots": 48, "start": 1000, "page_size": 16},
    "half": {"num_tokens": 60, "dtype": torch.bfloat16},
    "long": {"num_tokens": 700, "page_size": 16},
    "one-page": {"num_tokens": 16, "page_size": 16},
    "one-token": {"num_tokens": 1},
    "five-tokens": {"num_tokens": 5},
    "queries-after-the-node": {"num_tokens": 50, "window": (70, 102)},
    "queries-before-the-end": {"num_tokens": 100, "window": (60, 80)},
}
SINKS = 4


@pytest.fixture(params=ALL.values(), ids=ALL.keys())
def press(request):
    return request.param


@pytest.fixture(params=NODES.values(), ids=NODES.keys())
def case(request):
    return request.param


def budgets(num_slots):
    return sorted({max(min(SINKS, num_slots), round(num_slots * kept)) for kept in (0.0, 0.2, 0.5, 0.8, 1.0)})


def test_select_keeps_the_best_scores_after_the_sinks_and_no_more(press, case, make_node):
    node = make_node(**case)
    num_slots = node.slots.numel()
    scores = press.score(node)
    assert scores.dtype == torch.float32
    assert scores.shape == node.positions.shape
    assert torch.isfinite(scores).all()
    for num_kept in budgets(num_slots):
        kept = select(press, node, num_kept, SINKS)
        assert kept.dtype == torch.int32
        assert kept.shape == (*node.positions.shape[:2], num_kept)
        for layer, heads in enumerate(kept.tolist()):
            for head, indices in enumerate(heads):
                score, position = scores[layer, head].tolist(), node.positions[layer, head].tolist()
                order = sorted(
                    range(num_slots),
                    key=lambda i: (position[i] >= SINKS, -score[i] if position[i] >= SINKS else 0, i),
                )
                assert indices == sorted(order[:num_kept])


def test_every_sink_the_node_holds_survives(press, case, make_node):
    node = make_node(**case)
    kept = select(press, node, max(1, min(SINKS, node.slots.numel())), SINKS).long()
    survivors = node.positions.gather(-1, kept)
    assert torch.equal((survivors < SINKS).sum(-1), (node.positions < SINKS).sum(-1))


def test_same_node_same_survivors_wherever_its_slots_lie(press, case, make_node):
    num_kept = budgets(make_node(**case).slots.numel())[-2:][0]
    first, again, elsewhere = (make_node(**case, slot_seed=seed) for seed in (0, 0, 9))
    assert torch.equal(select(press, first, num_kept, SINKS), select(press, again, num_kept, SINKS))
    assert torch.equal(press.score(first), press.score(elsewhere))
    assert torch.equal(select(press, first, num_kept, SINKS), select(press, elsewhere, num_kept, SINKS))


def test_a_press_leaves_the_node_as_it_was(press, case, make_node):
    node = make_node(**case)
    tensors = [*node.k_buffers, *node.v_buffers, node.slots, node.positions, node.window.queries]
    before = [tensor.clone() for tensor in tensors]
    select(press, node, node.slots.numel(), SINKS)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_survivors_are_chosen_per_layer_and_head(make_node):
    for name in ("keydiff", "knorm", "snapkv", "value_key_ratio", "geometry", "band_lengths", "random"):
        kept = select(ALL[name], make_node(100), 60, SINKS)
        assert kept.flatten(0, 1).unique(dim=0).shape[0] == 6, name


def test_only_presses_that_need_queries_ask_for_them(press, make_node):
    node = dataclasses.replace(make_node(50), window=None)
    if press.needs_queries:
        with pytest.raises(ValueError, match=r"queries"):
            press.score(node)
    else:
        assert torch.equal(press.score(node), press.score(make_node(50)))


def test_only_the_press_that_needs_a_geometry_asks_for_it(make_node):
    for name, traits in core.PRESSES.items():
        if traits.needs_geometry:
            with pytest.raises(ValueError, match="the geometry of queries is missing.*--kv-geometry FILE"):
                get_press(name).score(make_node(50))
        else:
            assert get_press(name).score(make_node(50)).shape == (3, 2, 50)


def test_fewer_slots_than_sinks_is_refused(press, make_node):
    with pytest.raises(ValueError, match="4 sinks"):
        select(press, make_node(50), 3, SINKS)
    with pytest.raises(ValueError, match="2 sinks"):
        select(press, make_node(50, start=2), 1, SINKS)
    select(press, make_node(50, start=4), 1, SINKS)
    select(press, make_node(2), 2, SINKS)


@pytest.mark.parametrize("num_kept", [-1, 0, 51])
def test_a_count_the_node_cannot_keep_is_refused(press, make_node, num_kept):
    with pytest.raises(ValueError, match="expected 1 to 50"):
        select(press, make_node(50), num_kept, 0)


def test_a_score_that_is_not_a_number_goes_first(make_node):
    node = make_node(6)
    node.k_buffers[0][node.slots[2], 0] = float("nan")
    node.k_buffers[0][node.slots[5], 0] = float("inf")
    kept = select(get_press("knorm"), node, 4, 0)
    assert kept[0, 0].tolist() == [0, 1, 3, 4]


def test_scores_of_another_shape_are_refused(make_node):
    class PerToken:
        name = "per_token"
        needs_queries = False

        def score(self, node):
            return torch.zeros(node.slots.numel())

    with pytest.raises(ValueError, match="per_token"):
        select(PerToken(), make_node(6), 4, 0)


def test_an_input_whose_shapes_do_not_agree_is_refused(make_node):
    node = make_node(6)
    with pytest.raises(ValueError, match="layers"):
        dataclasses.replace(node, v_buffers=node.v_buffers[1:])
    with pytest.raises(ValueError, match="positions"):
        dataclasses.replace(node, slots=node.slots[1:])
    with pytest.raises(ValueError, match="5 tokens"):
        dataclasses.replace(node, num_tokens=5)


def test_registry_names_are_those_a_form_may_carry():
    for name, traits in core.PRESSES.items():
        press = get_press(name)
        assert (press.name, press.needs_queries) == (name, traits.needs_queries)
        assert get_press(name) is press


def test_unknown_name_lists_those_there_are():
    names = "keydiff, knorm, snapkv, value_key_ratio, geometry, band_lengths, streaming, random"
    with pytest.raises(ValueError, match=rf"'h2o'.*{names}"):
        get_press("h2o")
