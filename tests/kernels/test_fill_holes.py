from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.fill_holes import fill_holes

BACKENDS = ("triton", "torch")
INTEGERS = {2: torch.int16, 4: torch.int32}


def bits(layer):
    return layer.cpu().view(INTEGERS[layer.dtype.itemsize])


def expected_bits(layer, slots, targets, sources):
    """One row at a time, from a copy taken before."""
    before, after = bits(layer).clone(), bits(layer).clone()
    for head, (into, out_of) in enumerate(zip(targets.tolist(), sources.tolist(), strict=True)):
        for to, origin in zip(into, out_of, strict=True):
            if to >= 0:
                after[slots[to], head] = before[slots[origin], head]
    return after


def moves_of(case, kind):
    """Random number of moves per head, the rest -1: from the last quarter, or half, into what lies before it."""
    width = case.n // (2 if kind == "half" else 4)
    front = case.n - width
    shape = (2, case.num_heads)
    targets = torch.rand(*shape, front).argsort(-1)[..., :width].sort(-1).values.int()
    sources = (front + torch.rand(*shape, width).argsort(-1)).int()
    num_moves = torch.randint(0, width + 1, (*shape, 1)) if kind == "some" else torch.full((*shape, 1), width)
    absent = torch.arange(width) >= num_moves
    return targets.masked_fill(absent, -1), sources.masked_fill(absent, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["some", "quarter", "half"])
def test_fill_holes_makes_every_move_bit_for_bit_and_no_other(case, pool, device, backend, kind):
    targets, sources = moves_of(case, kind)
    for layers in (pool.k, pool.v):  # every bit pattern, NaN payloads and subnormals included
        for layer in layers:
            size = layer.dtype.itemsize
            low, high = -(2 ** (8 * size - 1)), 2 ** (8 * size - 1)
            layer.view(INTEGERS[size]).random_(low, high)
    here = pool.to(device)
    fill_holes(here.k, here.v, here.slots, targets.to(device), sources.to(device), backend=backend)
    for before, after in ((pool.k, here.k), (pool.v, here.v)):
        for layer in range(2):
            want = expected_bits(before[layer], pool.slots, targets[layer], sources[layer])
            assert torch.equal(bits(after[layer]), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fill_holes_takes_moves_that_are_not_contiguous(device, backend):
    layer = torch.arange(8.0).view(8, 1, 1).repeat(1, 1, 16)
    k, v = layer.clone().to(device), layer.clone().to(device)
    moves = torch.tensor([[[0, 6], [2, 7]]], dtype=torch.int32, device=device)
    fill_holes([k], [v], torch.arange(8, device=device), moves[..., :1].mT, moves[..., 1:].mT, backend=backend)
    for changed in (k, v):
        assert changed[:, 0, 0].tolist() == [6.0, 1.0, 7.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("targets", "sources", "message"),
    [
        (torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(1, 2, 3, dtype=torch.int32), "must be int32"),
        (torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), "must be int32"),
        (torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(1, 2, 2, dtype=torch.int32), "do not fit 1 layers"),
        (torch.zeros(2, 2, 3, dtype=torch.int32), torch.zeros(2, 2, 3, dtype=torch.int32), "do not fit 1 layers"),
    ],
)
def test_fill_holes_refuses_moves_that_do_not_fit(targets, sources, message):
    layer = torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match=message):
        fill_holes([layer], [layer.clone()], torch.arange(4), targets, sources)


def test_fill_holes_refuses_values_of_another_shape():
    moves = torch.zeros(1, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="k_buffers and v_buffers"):
        fill_holes([torch.zeros(8, 2, 16)], [torch.zeros(8, 2, 8)], torch.arange(4), moves, moves)
