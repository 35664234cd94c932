"""Kernels of codec lossless against ``codec.lossless``, byte for byte."""

from __future__ import annotations

import pytest
import torch

from sglang_evicpress.codec.layout import GROUP, HEADER, LosslessLayout
from sglang_evicpress.codec.lossless import CODEC
from sglang_evicpress.kernels import lossless_codec
from sglang_evicpress.kernels.lossless_codec import NO_ROOM, NOT_FINITE, decode, encode
from sglang_evicpress.kernels.stage import stage_table

BACKENDS = ("triton", "torch")
SHAPES = {
    # slots, kv heads, head_dim
    "two blocks and a tail": (70, 2, 64),
    "three heads, blocks alone": (64, 3, 80),
    "rows of several tiles": (33, 8, 128),
    "one slot": (1, 2, 64),
    "few channels": (97, 1, 8),
}


def kinds(size):
    """Rows of bfloat16 of many kinds, by turns; of each block's values one in 40 is far below its row's greatest."""
    sign = torch.randn(size).sign()
    every = [
        torch.randn(size),
        torch.zeros(size) * sign,
        torch.randn(size).relu(),
        torch.randn(size) * 1e-40,
        torch.randn(size) * 2e-38,
        sign * torch.finfo(torch.bfloat16).max,
        2.0 ** -(torch.arange(size[0] * size[1]) % 14).float().view(size),
        torch.randn(size) * 10.0 ** torch.randint(-30, 30, (size[0], 1)),
    ]
    row = torch.arange(size[0])[:, None] + int(torch.randint(len(every), ()))
    rows = torch.empty(size)
    for kind, these in enumerate(every):
        rows = torch.where(row % len(every) == kind, these, rows)
    far = torch.rand(size) < 1 / 50
    most = torch.finfo(torch.bfloat16).max
    return torch.where(far, 1e-7 * rows, rows).clamp(-most, most).bfloat16()


class Node:
    """Two layers of a pool with a node in some of its slots, the others NaN, and what the codec makes of its rows."""

    def __init__(self, shape, device):
        num_slots, num_heads, head_dim = SHAPES[shape]
        self.device = device
        self.layout = LosslessLayout(num_slots, num_heads * head_dim)
        self.slots = torch.randperm(2 * num_slots + 7)[:num_slots].to(device)
        size = 2 * num_slots + 7, num_heads, head_dim
        self.rows, self.pool = [], []
        for _ in range(4):
            rows = kinds((num_slots, num_heads * head_dim))
            layer = torch.full(size, torch.nan, dtype=torch.bfloat16, device=device)
            layer[self.slots] = rows.view(num_slots, *size[1:]).to(device)
            self.rows.append(rows)
            self.pool.append(layer)
        self.stored = torch.empty(2, self.layout.num_bytes, dtype=torch.uint8)
        for layer, stored in enumerate(self.stored):
            alone = stored.clone()
            CODEC.encode(*self.rows[layer::2], alone)
            stored.copy_(alone)

    def encoded(self, backend, **named):
        out = torch.full((2, self.layout.num_bytes), 0xAA, dtype=torch.uint8, device=self.device)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        encode(self.pool[:2], self.pool[2:], self.slots, self.layout, out, flag, backend=backend, **named)
        return out.cpu(), int(flag)


def words_of(rows):
    return rows.cpu().contiguous().view(torch.int16)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_encode_writes_the_bytes_of_the_codec(seed, device, shape, backend):
    node = Node(shape, device)
    out, flag = node.encoded(backend, table=stage_table(node.pool[:2], node.pool[2:]))
    assert not flag  # nothing but the node's own rows is judged
    assert torch.equal(out[:, HEADER.size :], node.stored[:, HEADER.size :])


def test_nodes_of_these_tests_have_escapes_in_each_block(seed, device):
    node = Node("two blocks and a tail", device)
    blocks = node.stored[:, HEADER.size : HEADER.size + 4 * node.layout.block_bytes].reshape(8, -1)
    escaped = blocks.split(node.layout.extents, 1)[3]
    assert (escaped != 0).sum(1).min() > 10 and (escaped != 0).sum(1).max() <= node.layout.num_channels


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_writes_the_rows_of_the_codec_and_no_other(seed, device, shape, backend):
    node = Node(shape, device)
    num_slots = node.layout.num_slots
    stored = node.stored.to(device)
    for begin, end in {(0, num_slots), (num_slots // 3, num_slots - num_slots // 4)}:
        target = node.slots.flip(0)[: end - begin]  # to slots that hold other rows
        pool = [layer.clone() for layer in node.pool]
        decode(pool[:2], pool[2:], target, node.layout, stored, begin, backend=backend)
        for found, before, rows in zip(pool, node.pool, node.rows, strict=True):
            expected = before.cpu().clone()
            expected[target.cpu()] = rows[begin:end].view(-1, *before.shape[1:])
            assert torch.equal(words_of(found), words_of(expected))


def test_bytes_that_no_encoder_writes_are_read_as_the_codec_reads_them(seed, device):
    node = Node("two blocks and a tail", device)
    random = torch.randint(0, 256, node.stored.shape, dtype=torch.uint8)  # one code in 16 is an escape
    random[0, : HEADER.size + 2 * node.layout.block_bytes] = 0xFF
    pools = [[layer.clone() for layer in node.pool] for _ in BACKENDS]
    for backend, pool in zip(BACKENDS, pools, strict=True):
        decode(pool[:2], pool[2:], node.slots, node.layout, random.to(device), 0, backend=backend)
    for one, other in zip(*pools, strict=True):
        assert torch.equal(words_of(one), words_of(other))


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize(("which", "slot"), [(0, 0), (3, 69), (2, 40)])
def test_rows_that_are_not_finite_are_told(seed, device, bad, which, slot, backend):
    node = Node("two blocks and a tail", device)
    node.pool[which][node.slots[slot], 1, 5] = bad
    assert node.encoded(backend)[1] == NOT_FINITE


@pytest.mark.parametrize("which", [0, 3])
def test_blocks_with_more_escapes_than_room_are_told(seed, device, which, backend):
    node = Node("three heads, blocks alone", device)
    channels = node.layout.num_channels
    values = torch.ones(GROUP * channels)
    order = torch.randperm(len(values))
    for count, expected in ((channels, 0), (channels + 1, NO_ROOM)):
        values[order[:count]] = 2.0**-14
        rows = values.view(GROUP, *node.pool[which].shape[1:]).bfloat16()
        node.pool[which][node.slots[GROUP:]] = rows.to(device)
        out, flag = node.encoded(backend)
        assert flag == expected
        if not flag:
            decode(node.pool[:2], node.pool[2:], node.slots, node.layout, out.to(device), 0, backend=backend)
            assert torch.equal(words_of(node.pool[which][node.slots[GROUP:]]), words_of(rows))


def test_the_kernels_run_where_they_are_asked_to(seed, device, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(lossless_codec, "encode_torch", refuse)
    monkeypatch.setattr(lossless_codec, "decode_torch", refuse)
    node = Node("one slot", device)
    stored = node.encoded("triton")[0].to(device)
    decode(node.pool[:2], node.pool[2:], node.slots, node.layout, stored, 0, backend="triton")
    none = torch.empty(0, dtype=torch.int64, device=device)
    empty = torch.zeros(2, HEADER.size, dtype=torch.uint8, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    layout = LosslessLayout(0, node.layout.num_channels)
    encode(node.pool[:2], node.pool[2:], none, layout, empty, flag, backend="triton")
    decode(node.pool[:2], node.pool[2:], none, layout, empty, 0, backend="triton")


LAYOUT = LosslessLayout(3, 32)
LAYER = torch.zeros(8, 2, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": LAYER.half()}, "a pool is of torch.float16: expected bfloat16"),
        ({"layout": LosslessLayout(3, 64)}, "layout has 64 channels, the pool 32"),
        ({"layer": LAYER[..., :6].contiguous(), "layout": LosslessLayout(3, 12)}, "a multiple of 8"),
        ({"stored": torch.zeros(1, LAYOUT.num_bytes + 1, dtype=torch.uint8)}, "expected contiguous torch.uint8"),
        ({"table": torch.zeros(2, dtype=torch.int64)}, r"expected uint64 \[2\]"),
        ({"slots": torch.arange(4)}, "expected"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    arguments = {"layer": LAYER, "slots": torch.arange(3), "layout": LAYOUT, "table": None}
    arguments["stored"] = torch.zeros(1, LAYOUT.num_bytes, dtype=torch.uint8)
    layer, slots, layout, table, stored = (arguments | given).values()
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        encode([layer], [layer], slots, layout, stored, flag, table=table)
    with pytest.raises(ValueError, match=message):
        decode([layer], [layer], slots, layout, stored, 0, table=table)
