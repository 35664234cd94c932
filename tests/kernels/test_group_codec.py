"""Kernels of the group codecs against ``codec.groups``, byte for byte."""

from __future__ import annotations

import pytest
import torch

from sglang_evicpress.codec.groups import GroupCodec
from sglang_evicpress.codec.layout import HEADER, GroupLayout
from sglang_evicpress.kernels import group_codec
from sglang_evicpress.kernels.group_codec import decode, encode
from sglang_evicpress.kernels.stage import stage_table

BACKENDS = ("triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = {
    # slots, kv heads, head_dim, window, group
    "two groups and a tail": (70, 2, 64, 0, 32),
    "one group, window": (37, 1, 128, 5, 32),
    "three heads": (33, 3, 64, 0, 32),
    "a window beyond the last group": (66, 2, 64, 40, 16),
    "one slot": (1, 2, 64, 0, 32),
    "all in the window": (40, 2, 64, 64, 32),
    "groups of few channels": (48, 1, 24, 3, 32),
}


def kinds(size):
    """Rows of many kinds, each in tiles of 32 slots and 32 channels."""
    sign = torch.randn(size).sign()
    every = [
        torch.randn(size),
        100 + 0.3 * torch.randn(size),
        torch.full(size, 3.3),
        torch.zeros(size) * sign,
        torch.randn(size) * 1e-40,
        sign * 3.38e38,
        sign * 65504,
        torch.randn(size) * 10.0 ** torch.randint(-7, 4, size),
        63.75 + 7.5 * torch.rand(size),
        torch.randn(size) * 2.0**-112,
        torch.randint(0, 16, size) * 0.5,
        1 + torch.randint(0, 250, size) * 2.0**-23,
        torch.randint(0, 300, size) * 2.0**-23 - 1,
        100 + 1e-4 * torch.randn(size),
    ]
    tile = (
        torch.arange(size[0])[:, None] // 32 + torch.arange(size[1])[None, :] // 32 + int(torch.randint(len(every), ()))
    )
    rows = torch.empty(size)
    for kind, these in enumerate(every):
        rows = torch.where(tile % len(every) == kind, these, rows)
    return rows


class Node:
    """Two layers of a pool with a node in some of its slots, the others NaN, and what the codec makes of its rows."""

    def __init__(self, shape, bits, dtype, device):
        num_slots, num_heads, head_dim, window, group = SHAPES[shape]
        self.layout = GroupLayout(bits, group, window, num_slots, num_heads * head_dim, dtype.itemsize)
        self.codec = GroupCodec(bits, group=group, window=window)
        self.slots = torch.randperm(2 * num_slots + 7)[:num_slots].to(device)
        most = torch.finfo(dtype).max
        size = 2 * num_slots + 7, num_heads, head_dim
        self.rows, self.pool = [], []
        for _ in range(4):
            rows = kinds((num_slots, num_heads * head_dim)).clamp(-most, most).to(dtype)
            layer = torch.full(size, torch.nan, dtype=dtype, device=device)
            layer[self.slots] = rows.view(num_slots, *size[1:]).to(device)
            self.rows.append(rows)
            self.pool.append(layer)
        self.stored = []
        for keys, values in zip(self.rows[:2], self.rows[2:], strict=True):
            self.stored.append(torch.empty(self.layout.num_bytes, dtype=torch.uint8))
            self.codec.encode(keys, values, self.stored[-1])
        self.device = device

    def encoded(self, backend, **named):
        out = torch.full((2, self.layout.num_bytes), 0xAA, dtype=torch.uint8, device=self.device)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        encode(self.pool[:2], self.pool[2:], self.slots, self.layout, out, flag, backend=backend, **named)
        return out.cpu(), int(flag)


def bits_of(rows):
    return rows.cpu().contiguous().view(torch.uint8)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_encode_writes_the_bytes_of_the_codec(seed, device, shape, dtype, bits, backend):
    node = Node(shape, bits, dtype, device)
    out, flag = node.encoded(backend)
    assert not flag
    for found, expected in zip(out, node.stored, strict=True):
        assert torch.equal(found[HEADER.size :], expected[HEADER.size :])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_writes_the_rows_of_the_codec_and_no_other(seed, device, shape, dtype, bits, backend):
    node = Node(shape, bits, dtype, device)
    num_slots = node.layout.num_slots
    stored = torch.stack(node.stored).to(device)
    for begin, end in {(0, num_slots), (num_slots // 3, num_slots - num_slots // 4)}:
        target = node.slots.flip(0)[: end - begin]  # to slots that hold other rows
        pool = [layer.clone() for layer in node.pool]
        decode(pool[:2], pool[2:], target, node.layout, stored, begin, backend=backend)
        for layer in range(2):
            rows = [torch.empty(end - begin, node.layout.num_channels, dtype=dtype) for _ in range(2)]
            node.codec.decode(node.stored[layer], num_slots, begin, *rows)
            for found, before, part in zip(pool[layer::2], node.pool[layer::2], rows, strict=True):
                expected = before.cpu().clone()
                expected[target.cpu()] = part.view(-1, *before.shape[1:])
                assert torch.equal(bits_of(found), bits_of(expected))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("which", "slot"), [(0, 0), (0, 69), (1, 3), (3, 69), (2, 40)])
def test_rows_that_are_not_finite_are_told(seed, device, bad, which, slot, backend):
    node = Node("two groups and a tail", 4, torch.bfloat16, device)
    node.pool[which][node.slots[slot], 1, 5] = bad
    assert node.encoded(backend)[1] == 1


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_however_many_values_of_a_byte_are_not_finite_it_is_told(seed, device, bits, dtype, backend):
    for count in range(1, 8 // bits + 1):
        for bad in (torch.nan, torch.inf):
            for which in (0, 2):
                node = Node("two groups and a tail", bits, dtype, device)
                stride = node.layout.group if which == 0 else node.layout.num_channels
                codes = [part * stride * bits // 8 + 5 for part in range(count)]  # code i of a group: byte i % part
                layer = node.pool[which].view(len(node.pool[which]), -1)
                if which == 0:
                    layer[node.slots[codes], 9] = bad
                else:
                    layer[node.slots[7], codes] = bad
                assert node.encoded(backend)[1] == 1


def test_nothing_but_the_nodes_own_rows_is_judged(seed, device, backend):
    node = Node("a window beyond the last group", 4, torch.float16, device)
    assert all(layer.isnan().any() for layer in node.pool)
    assert node.encoded(backend, table=stage_table(node.pool[:2], node.pool[2:]))[1] == 0


def test_a_node_without_slots_has_no_bytes_but_the_header(device, backend):
    pool = [torch.zeros(4, 2, 64, device=device) for _ in range(2)]
    none = torch.empty(0, dtype=torch.int64, device=device)
    layout = GroupLayout(4, 32, 0, 0, 128, 4)
    out = torch.zeros(1, HEADER.size, dtype=torch.uint8, device=device)
    encode(pool[:1], pool[1:], none, layout, out, torch.zeros(1, dtype=torch.int32, device=device), backend=backend)
    decode(pool[:1], pool[1:], none, layout, out, 0, backend=backend)
    assert not pool[0].any() and not pool[1].any()


def test_the_kernels_run_where_they_are_asked_to(seed, device, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(group_codec, "encode_torch", refuse)
    monkeypatch.setattr(group_codec, "decode_torch", refuse)
    node = Node("two groups and a tail", 2, torch.bfloat16, device)
    stored = node.encoded("triton")[0].to(device)
    decode(node.pool[:2], node.pool[2:], node.slots, node.layout, stored, 0, backend="triton")
    with pytest.raises(AssertionError):
        Node("groups of few channels", 4, torch.bfloat16, device).encoded("triton")  # half a group in a byte's part


LAYOUT = GroupLayout(4, 32, 0, 3, 32, 4)
LAYER = torch.zeros(8, 2, 16)
FLAG = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": GroupLayout(4, 32, 0, 3, 32, 2)}, "layout has 32 channels of 2 bytes: expected 32 of 4"),
        ({"layout": GroupLayout(4, 32, 0, 3, 64, 4)}, "layout has 64 channels"),
        ({"stored": torch.zeros(1, LAYOUT.num_bytes + 1, dtype=torch.uint8)}, "expected contiguous torch.uint8"),
        ({"stored": torch.zeros(1, LAYOUT.num_bytes, dtype=torch.int8)}, "expected contiguous torch.uint8"),
        ({"stored": torch.zeros(1, 1 + LAYOUT.num_bytes, dtype=torch.uint8)[:, 1:]}, "16-byte boundary"),
        ({"table": torch.zeros(2, dtype=torch.int64)}, r"expected uint64 \[2\]"),
        ({"slots": torch.arange(4)}, "expected"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    arguments = {"slots": torch.arange(3), "layout": LAYOUT, "table": None}
    arguments["stored"] = torch.zeros(1, LAYOUT.num_bytes, dtype=torch.uint8)
    slots, layout, table, stored = (arguments | given).values()
    with pytest.raises(ValueError, match=message):
        encode([LAYER], [LAYER], slots, layout, stored, FLAG, table=table)
    with pytest.raises(ValueError, match=message):
        decode([LAYER], [LAYER], slots, layout, stored, 0, table=table)


def test_a_flag_of_another_kind_is_refused():
    stored = torch.zeros(1, LAYOUT.num_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"flag is .*: expected int32 \[1\]"):
        encode([LAYER], [LAYER], torch.arange(3), LAYOUT, stored, torch.zeros(1))
