from __future__ import annotations

import pytest
import torch

from sglang_evicpress.kernels.stage import gather, scatter, stage_table

BACKENDS = ("triton", "torch")


def raw(tensor):
    """uint8 [rows, bytes] or [..., rows, bytes] on the CPU."""
    return tensor.cpu().contiguous().flatten(-2).view(torch.uint8)


def scramble(pool):
    """Every bit pattern, NaN payloads and subnormals included."""
    for layer in (*pool.k, *pool.v):
        layer.view(torch.uint8).random_(0, 256)


def any_rows(shape, dtype):
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)


def expected_staging(pool, slots):
    """One row at a time, in the order of a payload: of each layer the K rows, then the V rows."""
    rows = [
        raw(buffer)[slot] for pair in zip(pool.k, pool.v, strict=True) for buffer in pair for slot in slots.tolist()
    ]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_brings_every_row_to_its_place_in_a_payload(case, pool, device, backend):
    scramble(pool)
    here = pool.to(device)
    out = torch.empty(2, 2, case.n, case.num_heads, case.head_dim, dtype=case.dtype, device=device)
    gather(here.k, here.v, here.slots, out, backend=backend)
    assert torch.equal(raw(out).flatten(), expected_staging(pool, pool.slots))
    for before, after in zip((*pool.k, *pool.v), (*here.k, *here.v), strict=True):
        assert torch.equal(raw(after), raw(before))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["all", "first", "middle", "last", "none"])
def test_scatter_writes_the_rows_it_is_to_write_and_no_other(case, pool, device, backend, part):
    scramble(pool)
    third = case.n // 3
    begin, end = {"all": (0, case.n), "first": (0, third), "middle": (third, 2 * third)}.get(part, (case.n, case.n))
    begin = third if part == "last" else begin
    staged = any_rows((2, 2, end - begin, case.num_heads, case.head_dim), case.dtype)
    slots = pool.slots.flip(0)[begin:end]  # as part of a longer tensor: it need not start on a boundary
    here = pool.to(device)
    scatter(here.k, here.v, slots.to(device), staged.to(device), backend=backend)
    for section, layers in enumerate(((pool.k, here.k), (pool.v, here.v))):
        for layer, (before, after) in enumerate(zip(*layers, strict=True)):
            expected = raw(before).clone()
            for j, slot in enumerate(slots.tolist()):
                expected[slot] = raw(staged)[layer, section, j]
            assert torch.equal(raw(after), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [
        (1, 1, torch.uint8),
        (3, 5, torch.uint8),
        (1, 3, torch.float16),
        (8, 128, torch.uint8),
        (5, 128, torch.float32),  # a row of more words than a tile has columns
        (2, 64, torch.float8_e4m3fn),
    ],
)
def test_rows_of_any_dtype_and_width_go_out_and_come_back(device, backend, num_heads, head_dim, dtype):
    shape = (11, num_heads, head_dim)
    k, v = ([any_rows(shape, dtype).to(device) for _ in range(3)] for _ in range(2))
    copies = [[layer.clone() for layer in layers] for layers in (k, v)]
    slots = torch.tensor([7, 0, 10, 3, 4], device=device)
    staged = any_rows((3, 2, 5, num_heads, head_dim), dtype).to(device)
    gather(k, v, slots, staged, backend=backend)
    for layer in (*k, *v):
        layer[slots] = any_rows((5, num_heads, head_dim), dtype).to(device)
    scatter(k, v, slots, staged, backend=backend)
    for before, after in zip((*copies[0], *copies[1]), (*k, *v), strict=True):
        assert torch.equal(raw(after), raw(before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_layers_are_reached_through_their_part_of_the_table(device, backend):
    k, v = ([any_rows((6, 2, 16), torch.float32).to(device) for _ in range(4)] for _ in range(2))
    table, slots = stage_table(k, v), torch.tensor([4, 1, 2], device=device)
    out = any_rows((2, 2, 3, 2, 16), torch.float32).to(device)
    gather(k[1:3], v[1:3], slots, out, table=table[2:6], backend=backend)
    expected = torch.stack([torch.stack([k[layer][slots], v[layer][slots]]) for layer in (1, 2)])
    assert torch.equal(raw(out), raw(expected))
    scatter(k[:2], v[:2], slots, out, table=table[:4], backend=backend)
    for layer in range(2):
        assert torch.equal(raw(k[layer][slots]), raw(expected[layer, 0]))
        assert torch.equal(raw(v[layer][slots]), raw(expected[layer, 1]))


LAYER = torch.zeros(8, 2, 16)
SLOTS = torch.arange(3)
OFF = torch.zeros(193)[1:]


@pytest.mark.parametrize(
    ("staged", "message"),
    [
        (torch.zeros(1, 2, 3, 2, 16, dtype=torch.float16), "contiguous torch.float32"),
        (torch.zeros(2, 2, 3, 2, 16), "contiguous torch.float32"),
        (torch.zeros(2, 3, 2, 16), "contiguous torch.float32"),
        (torch.zeros(1, 2, 3, 2, 8), "contiguous torch.float32"),
        (torch.zeros(1, 2, 3, 16, 2).transpose(3, 4), "contiguous torch.float32"),
        (torch.zeros(1, 2, 3, 2, 16, device="meta"), "contiguous torch.float32"),
        (OFF.view(1, 2, 3, 2, 16), "16-byte boundary"),
    ],
)
def test_staging_that_does_not_fit_is_refused(staged, message):
    with pytest.raises(ValueError, match=message):
        gather([LAYER], [LAYER.clone()], SLOTS, staged)
    with pytest.raises(ValueError, match=message):
        scatter([LAYER], [LAYER.clone()], SLOTS, staged)


@pytest.mark.parametrize("copy", [gather, scatter])
def test_more_rows_than_slots_are_refused(copy):
    with pytest.raises(ValueError, match=r"staged is .*: expected .* \(1, 2, 3, 2, 16\)"):
        copy([LAYER], [LAYER.clone()], SLOTS, torch.zeros(1, 2, 4, 2, 16))


@pytest.mark.parametrize(
    "table",
    [torch.zeros(3, dtype=torch.uint64), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.uint64)],
)
def test_a_table_of_other_layers_is_refused(table):
    staged = torch.zeros(1, 2, 3, 2, 16)
    with pytest.raises(ValueError, match=r"table is .*: expected uint64 \[2\]"):
        gather([LAYER], [LAYER.clone()], SLOTS, staged, table=table)
    with pytest.raises(ValueError, match=r"table is .*: expected uint64 \[2\]"):
        scatter([LAYER], [LAYER.clone()], SLOTS, staged, table=table)


def test_values_of_another_shape_are_refused():
    staged = torch.zeros(1, 2, 3, 2, 16)
    for copy in (gather, scatter):
        with pytest.raises(ValueError, match="k_buffers and v_buffers"):
            copy([LAYER], [torch.zeros(8, 2, 8)], SLOTS, staged)
