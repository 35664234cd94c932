"""Scores of a request's slots, each against its formula written out for one (layer, head) at a time in float64."""

from __future__ import annotations

import pytest
import torch
from tests.unit.geometry.made import make_geometry
from tests.unit.geometry.test_score import expected_scores

from sglang_evicpress.decode_budget.scores import SCORES, page_means, score, survivors, worst_pages
from sglang_evicpress.press import PressInput, QueryWindow

NUM_LAYERS, NUM_HEADS, GROUP, HEAD_DIM = 2, 2, 2, 16
LENGTH, NUM_SLOTS, WINDOW = 90, 48, 8
GEOMETRY = make_geometry(NUM_LAYERS, NUM_HEADS * GROUP, NUM_HEADS)


def make_request(seed=0, num_queries=12, shuffled=True):
    """A request of 90 tokens in 48 slots: each head holds survivors of its own, in any order if ``shuffled``."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(NUM_LAYERS, LENGTH, NUM_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    priority = torch.rand(NUM_LAYERS, NUM_HEADS, LENGTH, generator=generator)
    priority[..., -3:] = 2.0  # the newest tokens, which came after the last pass
    positions = priority.topk(NUM_SLOTS).indices
    positions = positions if shuffled else positions.sort(-1).values
    slots = torch.randperm(NUM_SLOTS + 9, generator=generator)[:NUM_SLOTS]
    buffers = []
    for content in (keys, values):
        layers = torch.full((NUM_LAYERS, NUM_SLOTS + 9, NUM_HEADS, HEAD_DIM), float("nan"))
        index = positions.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, HEAD_DIM)
        layers[:, slots] = content.gather(1, index)
        buffers.append(list(layers))
    queries = torch.randn(NUM_LAYERS, num_queries, NUM_HEADS * GROUP, HEAD_DIM, generator=generator)
    return PressInput(
        k_buffers=buffers[0],
        v_buffers=buffers[1],
        slots=slots,
        positions=positions.int(),
        start=0,
        num_tokens=LENGTH,
        window=QueryWindow(queries, torch.arange(LENGTH - num_queries, LENGTH)) if num_queries else None,
        scale=HEAD_DIM**-0.5,
    )


def heads_of(node):
    """(layer, head, keys [n, D], values [n, D], positions [n]) in float64."""
    for layer, (k_buffer, v_buffer) in enumerate(zip(node.k_buffers, node.v_buffers, strict=True)):
        for head in range(NUM_HEADS):
            keys, values = k_buffer[node.slots, head].double(), v_buffer[node.slots, head].double()
            yield layer, head, keys, values, node.positions[layer, head].long()


def attention_rows(node, layer, head, keys, positions, num_queries):
    """Softmax of each of the last queries over the slots up to it: [queries, group, n]."""
    rows = []
    for query, at in zip(
        node.window.queries[layer, -num_queries:], node.window.positions[-num_queries:].tolist(), strict=True
    ):
        logits = query[head * GROUP : (head + 1) * GROUP].double() @ keys.T * node.scale
        rows.append(logits.masked_fill(positions > at, float("-inf")).softmax(-1))
    return torch.stack(rows)


def newest(positions, count=WINDOW):
    return positions.argsort(descending=True)[:count]


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_tova_is_the_attention_of_the_last_query():
    node = make_request()
    scores = score("tova", node, WINDOW)
    for layer, head, keys, _, positions in heads_of(node):
        close(scores[layer, head], attention_rows(node, layer, head, keys, positions, 1)[0].mean(0))


@pytest.mark.parametrize("num_queries", [12, 5])
def test_h2o_adds_up_the_attention_of_the_last_queries(num_queries):
    node = make_request(num_queries=num_queries)
    scores = score("h2o", node, WINDOW)
    for layer, head, keys, _, positions in heads_of(node):
        total = attention_rows(node, layer, head, keys, positions, min(WINDOW, num_queries)).mean(1).sum(0)
        recent = newest(positions)
        old = torch.tensor([index for index in range(NUM_SLOTS) if index not in recent.tolist()])
        close(scores[layer, head, old], total[old])
        assert scores[layer, head].argsort(descending=True)[:WINDOW].tolist() == recent.tolist()


@pytest.mark.parametrize("num_queries", [12, 0])
def test_r_kv_is_the_rank_of_importance_less_the_mean_cosine_with_the_newest_keys(num_queries):
    node = make_request(num_queries=num_queries)
    scores = score("r_kv", node, WINDOW)
    for layer, head, keys, values, positions in heads_of(node):
        if num_queries:
            importance = attention_rows(node, layer, head, keys, positions, WINDOW).mean((0, 1))
        else:
            importance = values.norm(dim=-1) / keys.norm(dim=-1)
        rank = importance.argsort().argsort() / (NUM_SLOTS - 1)
        recent = newest(positions)
        directions = keys / keys.norm(dim=-1, keepdim=True)
        expected = 0.5 * rank - 0.5 * (directions @ directions[recent].T).mean(-1)
        old = torch.tensor([index for index in range(NUM_SLOTS) if index not in recent.tolist()])
        close(scores[layer, head, old], expected[old])
        assert scores[layer, head].argsort(descending=True)[:WINDOW].tolist() == recent.tolist()


def test_r_kv_drops_the_repetition_before_its_equal_in_importance():
    node = make_request(num_queries=0, shuffled=False)
    for layer in range(NUM_LAYERS):
        k_buffer, v_buffer, slots = node.k_buffers[layer], node.v_buffers[layer], node.slots
        k_buffer[slots[10]] = k_buffer[slots[-1]]  # says what the newest token says
        k_buffer[slots[20]] = -k_buffer[slots[-1]]
        v_buffer[slots[20]] = v_buffer[slots[10]]
    scores = score("r_kv", node, 1)
    assert bool((scores[..., 10] < scores[..., 20]).all())
    ratios = score("value_key_ratio", node, 1)
    torch.testing.assert_close(ratios[..., 10], ratios[..., 20])


@pytest.mark.parametrize("name", ["value_key_ratio", "knorm", "keydiff", "streaming"])
def test_the_others_are_the_presses(name):
    node = make_request(num_queries=0)
    scores = score(name, node, WINDOW)
    for layer, head, keys, values, positions in heads_of(node):
        anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(0)
        expected = {
            "value_key_ratio": values.norm(dim=-1) / keys.norm(dim=-1),
            "knorm": -keys.norm(dim=-1),
            "keydiff": -(keys @ anchor) / (keys.norm(dim=-1) * anchor.norm()),
            "streaming": positions.double(),
        }
        close(scores[layer, head], expected[name])


@pytest.mark.parametrize("name", SCORES)
def test_scores_belong_to_the_tokens_and_not_to_where_they_lie(name):
    """Survivors that hole-filling leaves in any order score as a repack leaves them in order."""
    shuffled = make_request()
    order = shuffled.positions.argsort(-1)
    buffers = []
    for layers in (shuffled.k_buffers, shuffled.v_buffers):
        sorted_layers = []
        for layer, buffer in enumerate(layers):
            rows = buffer[shuffled.slots].transpose(0, 1)
            index = order[layer].unsqueeze(-1).expand(-1, -1, HEAD_DIM)
            sorted_layers.append(rows.gather(1, index).transpose(0, 1).contiguous())
        buffers.append(sorted_layers)
    in_order = PressInput(
        buffers[0], buffers[1], torch.arange(NUM_SLOTS), shuffled.positions.sort(-1).values, 0, LENGTH,
        shuffled.window, shuffled.scale,
    )  # fmt: skip
    scores = score(name, shuffled, WINDOW, GEOMETRY).gather(-1, order)
    torch.testing.assert_close(scores, score(name, in_order, WINDOW, GEOMETRY))


@pytest.mark.parametrize("name", SCORES)
def test_a_request_shorter_than_the_window_has_scores(name):
    whole = make_request()
    node = PressInput(
        whole.k_buffers, whole.v_buffers, whole.slots[:1], whole.positions[..., :1].contiguous(), 0, LENGTH,
        whole.window, whole.scale,
    )  # fmt: skip
    scores = score(name, node, WINDOW, GEOMETRY)
    assert scores.shape == (NUM_LAYERS, NUM_HEADS, 1)
    assert bool(scores.isfinite().all())


@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_scores_by_attention_are_refused_without_queries(name):
    with pytest.raises(ValueError, match=f"the queries of {name} are missing: expected"):
        score(name, make_request(num_queries=0), WINDOW)


def test_geometry_expects_queries_from_the_newest_position_on():
    node = make_request(num_queries=0)
    scores = score("geometry", node, WINDOW, GEOMETRY)
    keys = torch.stack([buffer[node.slots] for buffer in node.k_buffers])
    close(scores, expected_scores(GEOMETRY, keys.double(), node.positions, LENGTH - 1))


def test_geometry_is_refused_where_nothing_was_calibrated():
    with pytest.raises(ValueError, match="the geometry of queries of geometry is missing: expected that of the model"):
        score("geometry", make_request(), WINDOW)


def test_unknown_scores_and_empty_windows_are_refused():
    with pytest.raises(ValueError, match="'quest' is not known: expected one of value_key_ratio, knorm"):
        score("quest", make_request(), WINDOW)
    with pytest.raises(ValueError, match="the window of r_kv is 0"):
        score("r_kv", make_request(), 0)


def test_survivors_are_the_sinks_and_the_best_of_the_rest():
    node = make_request()
    scores = score("knorm", node, WINDOW)
    kept = survivors(scores, node.positions, 20, sinks=12, in_order=False)
    assert kept.dtype == torch.int32
    for layer, head, _, _, positions in heads_of(node):
        sinks = set((positions < 12).nonzero().flatten().tolist())
        rest = [index for index in scores[layer, head].argsort(descending=True).tolist() if index not in sinks]
        assert sinks
        assert kept[layer, head].tolist() == sorted(sinks | set(rest[: 20 - len(sinks)]))


def test_of_equal_scores_the_earlier_position_stays_wherever_it_lies():
    positions = torch.tensor([[[7, 0, 9, 3, 5]]], dtype=torch.int32)
    equal = torch.zeros(1, 1, 5)
    assert survivors(equal, positions, 3, 0, in_order=False).tolist() == [[[1, 3, 4]]]
    assert survivors(equal, positions.sort(-1).values, 3, 0, in_order=True).tolist() == [[[0, 1, 2]]]


def test_what_is_no_number_goes_first():
    scores = torch.tensor([[[float("nan"), 1.0, -5.0, float("nan")]]])
    positions = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    for in_order in (True, False):
        assert survivors(scores, positions, 2, 0, in_order=in_order).tolist() == [[[1, 2]]]


@pytest.mark.parametrize("num_kept", [0, 5])
def test_survivors_of_no_slots_or_too_many_are_refused(num_kept):
    with pytest.raises(ValueError, match=f"cannot keep {num_kept} of 4 slots"):
        survivors(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4, dtype=torch.int32), num_kept, 0, in_order=True)


def test_page_means_are_algorithm_1_over_all_layers_and_heads():
    scores = torch.rand(3, 2, 40)
    want = [scores[..., first : first + 16].mean() for first in (0, 16)] + [scores[..., 32:].mean()]
    torch.testing.assert_close(page_means(scores, 16), torch.stack(want))


@pytest.mark.parametrize(
    ("protected_pages", "num_pages", "worst"),
    [
        ((0, 0), 1, [0]),
        ((1, 0), 1, [4]),
        ((0, 1), 1, [0]),
        ((1, 1), 1, [2]),
        ((1, 1), 2, [1, 2]),
        ((1, 1), 3, [1, 2, 3]),
        ((0, 0), 5, [0, 1, 2, 3, 4]),
    ],
)
def test_the_lowest_unprotected_pages_are_freed(protected_pages, num_pages, worst):
    means = torch.tensor([0.1, 0.4, 0.3, 0.5, 0.2])
    assert worst_pages(means, protected_pages, num_pages).tolist() == worst


def test_of_equal_pages_the_first_is_freed_and_what_is_no_number_before_all():
    assert worst_pages(torch.tensor([0.2, 0.1, 0.1]), (0, 0)).tolist() == [1]
    assert worst_pages(torch.tensor([0.2, 0.1, float("nan")]), (0, 0)).tolist() == [2]


@pytest.mark.parametrize(("protected_pages", "num_pages"), [((1, 1), 1), ((0, 0), 3), ((1, 0), 0)])
def test_protected_pages_are_never_freed(protected_pages, num_pages):
    with pytest.raises(ValueError, match=f"cannot free {num_pages} pages"):
        worst_pages(torch.tensor([0.2, 0.1]), protected_pages, num_pages)
