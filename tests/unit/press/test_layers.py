"""Survivors in other numbers per layer, and slots that the heads of a layer share by their scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_evicpress.press import get_press, scored, select
from sglang_evicpress.press.layers import select_across_heads, select_by_layer

NAN, INF = math.nan, math.inf


def kept(mask: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in mask]


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "knorm"])
@pytest.mark.parametrize("num_kept", [4, 9, 20])
def test_equal_numbers_are_the_plain_press(make_node, name, num_kept):
    node = make_node(20)
    plain = select(get_press(name), node, num_kept, 4)
    by_layer = select_by_layer(scored(get_press(name), node, 4), [num_kept] * 3)
    assert torch.equal(torch.stack(by_layer), plain)


def test_each_layer_keeps_its_own_number(make_node):
    node = make_node(20)
    by_layer = select_by_layer(scored(get_press("keydiff"), node, 4), [20, 5, 11])
    assert [tuple(layer.shape) for layer in by_layer] == [(2, 20), (2, 5), (2, 11)]
    for layer, count in enumerate([20, 5, 11]):
        assert torch.equal(by_layer[layer], select(get_press("keydiff"), node, count, 4)[layer])


def test_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="2 numbers to keep are given: expected one for each of 3 layers"):
        select_by_layer(torch.zeros(3, 2, 5), [1, 2])


def test_slots_go_to_the_best_scores_of_all_heads_behind_the_safeguard():
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0], [1.0, 2.0, 3.0, 0.0, 4.0]])
    assert kept(select_across_heads(scores, 3, 0.0)) == [[0, 1, 2, 3, 4], [4]]
    assert kept(select_across_heads(scores, 3, 0.7)) == [[0, 1, 2, 3], [2, 4]]  # floor(0.7 * 3) = 2 are safe
    assert kept(select_across_heads(scores, 3, 1.0)) == [[0, 1, 2], [1, 2, 4]]


def test_ties_keep_the_lower_head_and_index_and_what_is_no_number_goes_first():
    assert kept(select_across_heads(torch.ones(2, 3), 2, 0.0)) == [[0, 1, 2], [0]]
    scores = torch.tensor([[NAN, -INF, 1.0], [NAN, INF, 0.0]])
    assert kept(select_across_heads(scores, 1, 0.0)) == [[2], [1]]
    assert kept(select_across_heads(scores, 3, 0.0)) == [[0, 1, 2], [0, 1, 2]]


@given(st.data())
def test_a_layer_never_keeps_more_than_even_heads_would_and_every_head_its_safeguard(data):
    heads, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    num_kept, safeguard = data.draw(st.integers(0, n)), data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.99, 1.0]))
    values = st.sampled_from([NAN, -INF, INF, 0.0, 1.0, 2.0, 3.0])
    scores = torch.tensor(data.draw(st.lists(values, min_size=heads * n, max_size=heads * n))).view(heads, n)
    mask = select_across_heads(scores, num_kept, safeguard)
    assert int(mask.sum()) == heads * num_kept
    num_safe = math.floor(safeguard * num_kept)
    assert int(mask.sum(-1).min()) >= num_safe
    rank = scores.nan_to_num(nan=-1e9, neginf=-1e9, posinf=1e9)
    safe = torch.stack([mask.new_zeros(n).index_fill(0, best_of(row, num_safe), True) for row in scores])
    assert bool((mask | ~safe).all())
    dropped, others = rank[~mask], rank[mask & ~safe]
    assert not len(dropped) or not len(others) or float(dropped.max()) <= float(others.min())


@given(st.data())
def test_no_other_split_of_the_slots_keeps_more_of_the_scores(data):
    heads, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    num_kept, seed = data.draw(st.integers(0, n)), data.draw(st.integers(0, 1000))
    scores = torch.rand(heads, n, generator=torch.Generator().manual_seed(seed)) ** 4
    kept_sum = float(scores[select_across_heads(scores, num_kept, 0.0)].sum())
    assert kept_sum == pytest.approx(float(scores.flatten().topk(heads * num_kept).values.sum()), rel=1e-5)
    even = scores.gather(1, select_by_layer(scores[None], [num_kept])[0].long())
    assert kept_sum >= float(even.sum()) - 1e-5


def best_of(scores: Tensor, count: int) -> Tensor:
    order = sorted(range(len(scores)), key=lambda i: (math.isnan(scores[i]), -float(scores[i].nan_to_num()), i))
    return torch.tensor(order[:count], dtype=torch.int64)


@pytest.mark.parametrize(
    ("scores", "num_kept", "safeguard", "words"),
    [
        (torch.zeros(2, 3), 4, 0.2, "num_kept is 4: expected between 0 and 3"),
        (torch.zeros(2, 3), 2, 1.5, "safeguard is 1.5: expected between 0 and 1"),
        (torch.zeros(1, 2, 3), 2, 0.2, r"scores are torch.float32 \(1, 2, 3\): expected float32 \[heads, n\]"),
    ],
)
def test_wrong_input_is_refused(scores, num_kept, safeguard, words):
    with pytest.raises(ValueError, match=words):
        select_across_heads(scores, num_kept, safeguard)
