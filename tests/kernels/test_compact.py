from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.compact import compact

BACKENDS = ("triton", "torch")
INTEGERS = {2: torch.int16, 4: torch.int32}


def bits(layer):
    return layer.cpu().view(INTEGERS[layer.dtype.itemsize])


def expected_bits(layer, slots, survivors):
    """One row at a time, from a copy taken before."""
    before, after = bits(layer).clone(), bits(layer).clone()
    for head, kept in enumerate(survivors.tolist()):
        for j, origin in enumerate(kept):
            after[slots[j], head] = before[slots[origin], head]
    return after


def survivors_of(case, kind):
    n = case.n
    if kind == "all":
        kept = torch.arange(n).expand(2, case.num_heads, n)
    elif kind == "dense":  # all but one: every row moves by one slot onto its neighbour
        kept = torch.stack([torch.arange(n)[torch.arange(n) != i % n] for i in range(2 * case.num_heads)])
        kept = kept.view(2, case.num_heads, -1)
    else:
        kept = torch.rand(2, case.num_heads, n).argsort(-1)[..., : n // 4 if kind == "few" else n * 3 // 4]
        kept = kept.sort(-1).values
    return kept.to(torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["few", "most", "dense", "all"])
def test_compact_moves_every_survivor_bit_for_bit_and_nothing_else(case, pool, device, backend, kind):
    if kind == "dense" and not case.n:
        kind = "all"
    survivors = survivors_of(case, kind)
    for layers in (pool.k, pool.v):  # every bit pattern, NaN payloads and subnormals included
        for layer in layers:
            size = layer.dtype.itemsize
            low, high = -(2 ** (8 * size - 1)), 2 ** (8 * size - 1)
            layer.view(INTEGERS[size]).random_(low, high)
    here = pool.to(device)
    compact(here.k, here.v, here.slots, survivors.to(device), backend=backend)
    for before, after in ((pool.k, here.k), (pool.v, here.v)):
        for layer in range(2):
            assert torch.equal(bits(after[layer]), expected_bits(before[layer], pool.slots, survivors[layer]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compact_is_safe_where_slots_run_backwards(device, backend):
    layer = torch.arange(300.0).view(300, 1, 1).repeat(1, 1, 16)
    slots = torch.arange(299, -1, -1)
    survivors = torch.arange(1, 300, dtype=torch.int32).view(1, 1, -1)
    k, v = layer.clone().to(device), layer.clone().to(device)
    compact([k], [v], slots.to(device), survivors.to(device), backend=backend)
    assert torch.equal(bits(k), expected_bits(layer, slots, survivors[0]))


@pytest.mark.parametrize(
    ("survivors", "message"),
    [
        (torch.zeros(1, 2, 3, dtype=torch.int64), "must be int32"),
        (torch.zeros(2, 3, dtype=torch.int32), "must be int32"),
        (torch.zeros(2, 2, 3, dtype=torch.int32), "do not fit 1 layers of 2 heads and 4 slots"),
        (torch.zeros(1, 2, 5, dtype=torch.int32), "do not fit 1 layers of 2 heads and 4 slots"),
    ],
)
def test_compact_refuses_survivors_that_do_not_fit(survivors, message):
    layer = torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match=message):
        compact([layer], [layer.clone()], torch.arange(4), survivors)


def test_compact_refuses_values_of_another_shape():
    with pytest.raises(ValueError, match="k_buffers and v_buffers"):
        survivors = torch.zeros(1, 2, 1, dtype=torch.int32)
        compact([torch.zeros(8, 2, 16)], [torch.zeros(8, 2, 8)], torch.arange(4), survivors)
