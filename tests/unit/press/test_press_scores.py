"""Each press against its formula, written out for one (layer, head) at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.unit.geometry.made import make_geometry

from sglang_evicpress.press import select
from sglang_evicpress.press.band_lengths import BandLengthsPress
from sglang_evicpress.press.keydiff import KeyDiff
from sglang_evicpress.press.knorm import Knorm
from sglang_evicpress.press.random import Random
from sglang_evicpress.press.snapkv import SnapKV
from sglang_evicpress.press.streaming import Streaming
from sglang_evicpress.press.value_key_ratio import ValueKeyRatio

NODES = [
    {"num_tokens": 70},
    {"num_tokens": 96, "num_slots": 48, "page_size": 16, "start": 32},
    {"num_tokens": 3},
]


@pytest.fixture(params=NODES, ids=["exact", "compressed", "tiny"])
def node(request, make_node):
    return make_node(**request.param)


def rows(node):
    """(layer, head, keys [n, D], values [n, D]) in float64."""
    for layer, (k_buffer, v_buffer) in enumerate(zip(node.k_buffers, node.v_buffers, strict=True)):
        for head in range(k_buffer.shape[1]):
            yield layer, head, k_buffer[node.slots, head].double(), v_buffer[node.slots, head].double()


def close(actual, expected):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), rtol=1e-5, atol=1e-6)


def test_knorm_is_minus_the_key_norm(node):
    scores = Knorm().score(node)
    for layer, head, keys, _ in rows(node):
        close(scores[layer, head], [-math.sqrt(sum(x * x for x in key)) for key in keys.tolist()])


def test_keydiff_is_minus_the_cosine_to_the_mean_direction(node):
    scores = KeyDiff().score(node)
    for layer, head, keys, _ in rows(node):
        anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(dim=0)
        close(scores[layer, head], [-(key @ anchor) / (key.norm() * anchor.norm()) for key in keys])


def test_value_key_ratio_is_algorithm_1_per_token(node):
    scores = ValueKeyRatio().score(node)
    for layer, head, keys, values in rows(node):
        close(scores[layer, head], values.norm(dim=-1) / keys.norm(dim=-1))


def test_streaming_keeps_the_sinks_and_the_most_recent(make_node):
    kept = select(Streaming(), make_node(100), 10, sinks=4)
    assert (kept == torch.tensor([0, 1, 2, 3, 94, 95, 96, 97, 98, 99])).all()
    kept = select(Streaming(), make_node(100, start=16), 10, sinks=4)
    assert (kept == torch.arange(90, 100)).all()


def test_random_is_the_same_on_every_machine(make_node):
    scores = (Random(seed=3).score(make_node(4, start=5)) * (1 << 24)).to(torch.int64)
    for layer in range(3):
        for head in range(2):
            expected = [split_mix(split_mix(split_mix(3 + layer) + head) + p) >> 40 for p in range(5, 9)]
            assert scores[layer, head].tolist() == expected


def test_random_draws_for_the_layers_that_it_is_given(make_node):
    whole, node = Random().score(make_node(40)), make_node(40)
    two = node.k_buffers[:2], node.v_buffers[:2], node.positions[:2]
    some = Random(layers=(2, 0)).score(replace(node, k_buffers=two[0], v_buffers=two[1], positions=two[2]))
    assert torch.equal(some, whole[[2, 0]])


def split_mix(x, mask=(1 << 64) - 1):
    """SplitMix64 as published, on Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_random_is_spread_evenly_and_ignores_the_global_generator(make_node):
    node = make_node(4000)
    torch.manual_seed(0)
    scores = Random().score(node)
    torch.manual_seed(1)
    assert torch.equal(scores, Random().score(node))
    assert not torch.equal(scores, Random(seed=1).score(node))
    deciles = torch.histc(scores, bins=10, min=0, max=1)
    assert (deciles - scores.numel() / 10).abs().max() < 5 * math.sqrt(scores.numel() * 0.09)


def test_random_keeps_a_token_whatever_node_it_is_in(make_node):
    whole, tail = Random().score(make_node(64)), Random().score(make_node(40, start=24))
    assert torch.equal(whole[..., 24:], tail)


def test_random_seed_out_of_range_is_refused():
    for seed in (-1, 1 << 63):
        with pytest.raises(ValueError, match="seed"):
            Random(seed=seed)


def snapkv_by_hand(node, layer, head, keys, window, kernel_size, pooling):
    """SnapKV's score of one kv head for the tokens before the window, one query and one token at a time."""
    queries, query_positions = (
        node.window.queries[layer, -window:].double(),
        node.window.positions[-window:].tolist(),
    )
    positions = node.positions[layer, head].tolist()
    past = [i for i, position in enumerate(positions) if position < query_positions[0]]
    group = queries.shape[1] // node.positions.shape[1]
    total = [0.0] * len(past)
    for query_head in range(head * group, (head + 1) * group):
        mean = [0.0] * len(past)
        for query, at in zip(queries[:, query_head], query_positions, strict=True):
            weights = [
                math.exp(float(query @ key) * node.scale) if p <= at else 0.0
                for key, p in zip(keys, positions, strict=True)
            ]
            mean = [m + weights[i] / sum(weights) / len(query_positions) for m, i in zip(mean, past, strict=True)]
        half = kernel_size // 2
        for i in range(len(past)):
            near = mean[max(0, i - half) : i + half + 1]
            total[i] += max(near) if pooling == "max" else sum(near) / kernel_size
    return past, [score / group for score in total]


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize(
    "case",
    [
        {"num_tokens": 50},
        {"num_tokens": 50, "start": 16, "num_slots": 30},
        {"num_tokens": 30, "window": (40, 60)},
        {"num_tokens": 40, "window": (20, 30)},
        {"num_tokens": 12, "window": (10, 12)},
    ],
    ids=["whole", "compressed", "queries-after", "queries-before-the-end", "short-window"],
)
def test_snapkv_is_the_pooled_attention_of_the_window(make_node, case, pooling):
    node = make_node(**case)
    scores = SnapKV(window=16, kernel_size=5, pooling=pooling).score(node)
    for layer, head, keys, _ in rows(node):
        past, expected = snapkv_by_hand(node, layer, head, keys, 16, 5, pooling)
        close(scores[layer, head, past], expected)
        window = scores[layer, head, len(past) :]
        assert (window > 1).all()
        assert (window.diff() > 0).all()


def test_snapkv_keeps_the_latest_of_a_window_that_does_not_fit(make_node):
    kept = select(SnapKV(window=32), make_node(100), 10, sinks=4)
    assert (kept == torch.tensor([0, 1, 2, 3, 94, 95, 96, 97, 98, 99])).all()


def test_snapkv_keeps_what_the_window_looks_at(make_node):
    node = make_node(200)
    for layer, (k_buffer, queries) in enumerate(zip(node.k_buffers, node.window.queries, strict=True)):
        queries += 3.0
        k_buffer[node.slots[40 + layer]] = 3.0
    kept = select(SnapKV(), node, 32 + 7, sinks=0)
    for layer, heads in enumerate(kept.tolist()):
        assert all(head[:7] == list(range(37 + layer, 44 + layer)) for head in heads)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"window": 0}, "window"),
        ({"window": 257}, "window"),
        ({"kernel_size": 4}, "odd"),
        ({"kernel_size": -1}, "odd"),
        ({"pooling": "min"}, "'min'"),
    ],
)
def test_snapkv_settings_out_of_range_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        SnapKV(**settings)


def test_snapkv_with_heads_that_do_not_divide_is_refused(make_node):
    node = make_node(40)
    odd = type(node.window)(node.window.queries[:, :, :3], node.window.positions)
    with pytest.raises(ValueError, match="3 query heads"):
        SnapKV().score(type(node)(**{f: getattr(node, f) for f in node.__slots__} | {"window": odd}))


def test_band_lengths_weighs_a_keys_bands_by_the_lengths_of_queries(node):
    geometry = make_geometry()
    scores = BandLengthsPress(geometry).score(node)
    for layer, head, keys, _ in rows(node):
        first, second = keys.chunk(2, dim=1)  # a band is a dimension of each half
        expected = geometry.lengths[layer].view(2, 2, -1)[head].double() @ (first**2 + second**2).sqrt().T
        expected = expected - expected.mean(-1, keepdim=True)
        close(scores[layer, head], (expected / expected.square().mean(-1, keepdim=True).sqrt()).amax(0))
