from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.window_attention import window_attention

BACKENDS = ("triton", "torch")


def naive(queries, keys, query_positions, key_positions, scale):
    """One query at a time, float64: queries [L, W, Hq, D], keys [L, H, n, D]."""
    layers, window, query_heads, _ = queries.shape
    heads, n = keys.shape[1:3]
    out = torch.zeros(layers, query_heads, n, dtype=torch.float64)
    for layer in range(layers):
        for query_head in range(query_heads):
            head = query_head // (query_heads // heads)
            for w in range(window):
                seen = key_positions[layer, head] <= query_positions[w]
                if seen.any():
                    logits = keys[layer, head, seen] @ queries[layer, w, query_head].double() * scale
                    weights = (logits - logits.max()).exp()
                    out[layer, query_head, seen] += weights / weights.sum() / window
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("group", "window"), [(3, 5), (2, 16)])
def test_window_attention_equals_a_loop_over_queries(case, pool, device, backend, group, window):
    generator = torch.Generator().manual_seed(1)
    n, heads = case.n, case.num_heads
    # small integers: logits of thousands are exact in float32, so a one-hot softmax is tested too
    values = torch.randint(-4, 5, (2, n, heads, case.head_dim), generator=generator)
    for layer, rows in zip(pool.k, values, strict=True):
        layer[pool.slots] = rows.to(case.dtype)
    high = 9 if case.extreme else 1
    queries = torch.randint(-high, high + 1, (2, window, heads * group, case.head_dim), generator=generator)
    queries = queries.to(case.dtype)
    # as after an earlier compression: gaps that differ by head, a window that starts among the keys
    gaps = torch.randint(1, 4, (2, heads, n), generator=generator)
    key_positions = gaps.cumsum(-1).to(torch.int32)
    query_positions = torch.arange(window) + max(0, n - window)
    scale = 1.0 if case.extreme else case.head_dim**-0.5
    here = pool.to(device)
    actual = window_attention(
        queries.to(device),
        here.k,
        here.slots,
        query_positions.to(device),
        key_positions.to(device),
        scale,
        backend=backend,
    )
    expected = naive(queries, pool.rows(pool.k), query_positions, key_positions, scale)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_no_key_adds_nothing_but_counts(device, backend):
    keys = [torch.randn(4, 1, 16).to(device)]
    positions = torch.tensor([[[5, 6, 7, 8]]]).to(device)
    actual = window_attention(
        torch.randn(1, 2, 1, 16).to(device),
        keys,
        torch.arange(4).to(device),
        torch.tensor([4, 5]).to(device),
        positions,
        0.25,
        backend=backend,
    )
    assert actual.flatten().tolist() == [0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_attention_sums_over_many_chunks_and_splits_a_large_group(device, backend):
    n, window, group = 1100, 32, 8
    keys = torch.randn(n, 1, 16)
    queries = torch.randn(1, window, group, 16)
    slots = torch.randperm(n)
    query_positions = torch.arange(n - window, n)
    key_positions = torch.arange(n).expand(1, 1, n)
    actual = window_attention(
        queries.to(device),
        [keys.to(device)],
        slots.to(device),
        query_positions.to(device),
        key_positions.to(device),
        0.25,
        backend=backend,
    )
    expected = naive(queries, keys[slots].double().transpose(0, 1)[None], query_positions, key_positions, 0.25)
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-4, atol=1e-7)


GOOD = {
    "queries": torch.zeros(1, 2, 4, 16),
    "query_positions": torch.zeros(2, dtype=torch.int64),
    "key_positions": torch.zeros(1, 2, 3, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"queries": torch.zeros(1, 2, 4, 8)}, "expected .layers, W, query heads, head_dim"),
        ({"queries": torch.zeros(2, 2, 4, 16)}, "expected .layers, W, query heads, head_dim"),
        ({"queries": torch.zeros(1, 2, 3, 16)}, "3 query heads do not divide over 2 kv heads"),
        ({"queries": torch.zeros(1, 300, 4, 16)}, "the window has 300 queries: expected 1 to 256"),
        ({"queries": torch.zeros(1, 0, 4, 16)}, "the window has 0 queries: expected 1 to 256"),
        ({"query_positions": torch.zeros(3, dtype=torch.int64)}, "query_positions must be int64"),
        ({"query_positions": torch.zeros(2, dtype=torch.int32)}, "query_positions must be int64"),
        ({"key_positions": torch.zeros(1, 2, 4, dtype=torch.int32)}, "expected int32 or int64"),
        ({"key_positions": torch.zeros(1, 2, 3)}, "expected int32 or int64"),
        ({"key_positions": torch.zeros(1, 2, 3, dtype=torch.int32, device="meta")}, "must be on cpu"),
    ],
)
def test_window_attention_names_the_argument_that_does_not_fit(bad, message):
    arguments = GOOD | bad
    with pytest.raises(ValueError, match=message):
        window_attention(
            arguments["queries"],
            [torch.zeros(8, 2, 16)],
            torch.arange(3),
            arguments["query_positions"],
            arguments["key_positions"],
            1.0,
        )
