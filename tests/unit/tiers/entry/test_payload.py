"""KV through a payload and back, bit for bit: every dtype, in one run or in many, whole or in parts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.codec import NotFiniteError
from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.header import ITEM_BYTES, BadEntry, Extent, Header, check_extent, coder_of, problem_of
from sglang_evicpress.tiers.entry.payload import PayloadCopier, check_layout, layout_of
from sglang_evicpress.tiers.host.allocator import Run
from sglang_evicpress.tiers.host.arena import Arena

GRANULE = 64
DTYPES = sorted(ITEM_BYTES)
SLOTS = 40


def pool_of(
    dtype: str, num_layers: int, num_heads: int, head_dim: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V buffers of any bits at all: not-a-numbers, infinities and negative zeros among them."""
    shape = (SLOTS, num_heads, head_dim * ITEM_BYTES[dtype])
    buffers = [
        torch.randint(0, 256, shape, dtype=torch.uint8).view(getattr(torch, dtype)) for _ in range(2 * num_layers)
    ]
    return buffers[:num_layers], buffers[num_layers:]


def bits(buffers: list[torch.Tensor]) -> np.ndarray:
    """uint8 [buffers, slots, heads, bytes]."""
    return np.stack([buffer.view(torch.uint8).numpy() for buffer in buffers])


def torn_runs(arena: Arena, num_bytes: int, rng: random.Random) -> tuple[Run, ...]:
    """Room for so many bytes in an arena of which every second or third granule is taken."""
    period = rng.choice([2, 3])
    granules = [arena.extents.alloc(1) for _ in range(arena.num_bytes // arena.extents.granule)]
    for index, runs in enumerate(granules):
        if index % period:
            arena.extents.free(runs)
    found = arena.extents.alloc(num_bytes)
    assert found is not None
    return found


def in_order(draw: random.Random, num_slots: int, is_block: bool) -> torch.Tensor:
    if is_block:
        begin = draw.randrange(SLOTS - num_slots + 1)
        return torch.arange(begin, begin + num_slots)
    return torch.tensor(draw.sample(range(SLOTS), num_slots), dtype=torch.int64)


def layout_with(num_layers: int, num_heads: int, num_slots: int, rng: random.Random) -> SurvivorLayout:
    kept = [[sorted(rng.sample(range(1 << 30), num_slots)) for _ in range(num_heads)] for _ in range(num_layers)]
    positions = torch.tensor(kept, dtype=torch.int32).view(num_layers, num_heads, num_slots)
    logical = torch.tensor(sorted(rng.sample(range(1 << 30), num_slots)), dtype=torch.int64)
    return SurvivorLayout(HostCopy(positions), HostCopy(logical), num_slots)


def load(
    copier: PayloadCopier,
    slots: torch.Tensor,
    arena: Arena,
    runs: tuple[Run, ...],
    extents: tuple[Extent, ...],
    begin: int,
    num_slots: int,
) -> None:
    for layer in range(copier.num_layers):
        copier.load_layers(range(layer, layer + 1), slots, arena, runs, extents, begin, num_slots)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(DTYPES),
    num_layers=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8, 16]),
    num_slots=st.integers(1, SLOTS),
    is_torn=st.booleans(),
    is_lossy=st.booleans(),
    blocks=st.tuples(st.booleans(), st.booleans()),
)
def test_what_was_saved_is_loaded_bit_for_bit(
    seed: int,
    dtype: str,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_slots: int,
    is_torn: bool,
    is_lossy: bool,
    blocks: tuple[bool, bool],
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    k_buffers, v_buffers = pool_of(dtype, num_layers, num_heads, head_dim)
    copier = PayloadCopier(k_buffers, v_buffers, 1)
    layout = layout_with(num_layers, num_heads, num_slots, rng) if is_lossy else None
    num_bytes = sum(copier.sizes(num_slots, is_lossy))
    arena = Arena(4 * (num_bytes + GRANULE), granule=GRANULE, max_runs=10_000)
    runs = torn_runs(arena, num_bytes, rng) if is_torn else arena.extents.alloc(num_bytes)
    slots = in_order(rng, num_slots, blocks[0])
    before = bits([*k_buffers, *v_buffers])
    extents = copier.save(slots, layout, arena, runs)
    assert np.array_equal(bits([*k_buffers, *v_buffers]), before)
    for extent in extents:
        check_extent(extent, arena.buffers(runs, extent.offset, extent.num_bytes))

    # A part of it, as that of a split node, to other slots; every other slot stays as it is.
    begin = rng.randrange(num_slots)
    count = rng.randrange(1, num_slots - begin + 1)
    target = in_order(rng, count, blocks[1])
    load(copier, target, arena, runs, extents, begin, num_slots)
    expected = before.copy()
    expected[:, target.numpy()] = before[:, slots[begin : begin + count].numpy()]
    assert np.array_equal(bits([*k_buffers, *v_buffers]), expected)

    if layout is not None:
        numbers = torch.cat(arena.tensors(runs, extents[-1].offset, extents[-1].num_bytes))
        found = layout_of(numbers, copier.shape, num_slots)
        assert torch.equal(found.positions, layout.positions) and found.positions.dtype == torch.int32
        assert torch.equal(found.logical, layout.logical) and found.logical.dtype == torch.int64
        assert found.num_slots == num_slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [EXACT, Form("knorm", 0.5)])
def test_the_extents_are_those_that_a_header_of_the_shape_must_have(dtype: str, form: Form) -> None:
    k_buffers, v_buffers = pool_of(dtype, 2, 3, 8)
    copier = PayloadCopier(k_buffers, v_buffers, 4)
    layout = None if form.is_exact else layout_with(2, 3, 12, random.Random(0))
    arena = Arena(1 << 16)
    runs = arena.extents.alloc(sum(copier.sizes(12, layout is not None)))
    extents = copier.save(torch.arange(12), layout, arena, runs)
    tokens = bytes(4 * (12 if form.is_exact else 24))
    key = bytes(16)
    header = Header(key, key, key, key, 0, tokens, form, False, 12, copier.shape, extents)
    assert problem_of(header) is None
    assert copier.shape.dtype == dtype and [extent.num_bytes for extent in extents] == copier.sizes(
        12, layout is not None
    )


def test_a_layer_is_k_rows_then_v_rows_and_survivors_are_positions_then_logical() -> None:
    k_buffers, v_buffers = pool_of("float16", 2, 1, 4)
    copier = PayloadCopier(k_buffers, v_buffers, 1)
    layout = layout_with(2, 1, 3, random.Random(0))
    arena = Arena(1 << 16)
    runs = arena.extents.alloc(sum(copier.sizes(3, True)))
    slots = torch.tensor([5, 1, 7])
    extents = copier.save(slots, layout, arena, runs)
    data = b"".join(bytes(chunk) for chunk in arena.buffers(runs, 0, extents[-1].offset + extents[-1].num_bytes))
    rows = [buffer[slots].view(torch.uint8).numpy().tobytes() for buffer in (k_buffers[0], v_buffers[0])]
    rows += [buffer[slots].view(torch.uint8).numpy().tobytes() for buffer in (k_buffers[1], v_buffers[1])]
    numbers = [layout.positions.numpy().astype("<i4").tobytes(), layout.logical.numpy().astype("<i4").tobytes()]
    assert data == b"".join(rows + numbers)


def test_an_entry_without_slots_is_saved_and_loaded() -> None:
    k_buffers, v_buffers = pool_of("bfloat16", 2, 2, 4)
    copier = PayloadCopier(k_buffers, v_buffers, 1)
    arena = Arena(1 << 16)
    runs = arena.extents.alloc(1)
    none = torch.empty(0, dtype=torch.int64)
    before = bits(k_buffers)
    extents = copier.save(none, layout_with(2, 2, 0, random.Random(0)), arena, runs)
    assert [extent.num_bytes for extent in extents] == [0, 0, 0]
    load(copier, none, arena, runs, extents, 0, 0)
    assert np.array_equal(bits(k_buffers), before)
    found = layout_of(torch.empty(0, dtype=torch.uint8), copier.shape, 0)
    assert found.positions.shape == (2, 2, 0) and len(found.logical) == 0


def test_survivors_that_no_node_of_its_size_can_have_are_refused() -> None:
    """Of twelve tokens from 100 on; survivors may be of positions before that, in a piece of a split."""
    sound = torch.tensor([[[3, 100, 111]]], dtype=torch.int32), torch.tensor([0, 5, 11])
    check_layout(SurvivorLayout(*map(HostCopy, sound), 3), 100, 12)
    for positions, logical in (
        ([3, 100, 111], [0, 5, 12]),
        ([3, 100, 111], [-1, 5, 11]),
        ([3, 100, 111], [0, 5, 5]),
        ([3, 100, 112], [0, 5, 11]),
        ([-1, 100, 111], [0, 5, 11]),
        ([3, 3, 111], [0, 5, 11]),
    ):
        layout = SurvivorLayout(
            HostCopy(torch.tensor([[positions]], dtype=torch.int32)), HostCopy(torch.tensor(logical)), 3
        )
        with pytest.raises(BadEntry, match="its survivors are not those of 12 tokens from 100 on"):
            check_layout(layout, 100, 12)


def test_every_flipped_bit_is_seen() -> None:
    k_buffers, v_buffers = pool_of("uint8", 1, 1, 4)
    copier = PayloadCopier(k_buffers, v_buffers, 1)
    arena = Arena(1 << 12, granule=8)
    runs = torn_runs(arena, 24, random.Random(3))
    assert len(runs) > 1
    (extent,) = copier.save(torch.arange(3), None, arena, runs)
    for byte in range(extent.num_bytes):
        (chunk,) = arena.buffers(runs, byte, 1)
        for bit in range(8):
            chunk[0] ^= 1 << bit
            with pytest.raises(BadEntry, match="checksum"):
                check_extent(extent, arena.buffers(runs, extent.offset, extent.num_bytes))
            chunk[0] ^= 1 << bit
    check_extent(extent, arena.buffers(runs, extent.offset, extent.num_bytes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_same_on_a_cuda_device(dtype: str) -> None:
    k_buffers, v_buffers = pool_of(dtype, 3, 2, 16)
    before = bits([*k_buffers, *v_buffers])
    k_buffers, v_buffers = ([buffer.cuda() for buffer in buffers] for buffers in (k_buffers, v_buffers))
    copier = PayloadCopier(k_buffers, v_buffers, 1)
    arena = Arena(1 << 16, is_pinned=True, granule=GRANULE, max_runs=10_000)
    slots = torch.randperm(SLOTS)[:17].cuda()
    written = torch.cuda.Event()
    written.record()
    runs = torn_runs(arena, sum(copier.sizes(17, False)), random.Random(0))
    extents = copier.save(slots, None, arena, runs, written)
    for extent in extents:
        check_extent(extent, arena.buffers(runs, extent.offset, extent.num_bytes))
    target = torch.randperm(SLOTS)[:9].cuda()
    with copier.stream(written):
        load(copier, target, arena, runs, extents, 4, 17)
        event = copier.finish_layers()
    torch.cuda.current_stream().wait_event(event)
    expected = before.copy()
    expected[:, target.cpu().numpy()] = before[:, slots[4:13].cpu().numpy()]
    assert np.array_equal(bits([buffer.cpu() for buffer in (*k_buffers, *v_buffers)]), expected)
    arena.close()


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_aside", [False, True])
def test_what_a_codec_stored_is_loaded_as_it_decodes(is_aside: bool, dtype: str, codec: str) -> None:
    torch.manual_seed(1)
    rows = [[torch.randn(150, 2, 16).to(getattr(torch, dtype)) for _ in range(2)] for _ in range(2)]
    copier = PayloadCopier(*rows, 1)
    layout, slots = layout_with(2, 2, 70, random.Random(0)), torch.randperm(150)[:70]
    sizes = copier.sizes(70, True, codec)
    arena = Arena(1 << 20, granule=GRANULE, max_runs=10_000)
    runs = torn_runs(arena, sum(sizes), random.Random(2))
    if is_aside:
        end = copier.begin_save(slots, layout, arena, runs, codec)
        before = [[buffer.clone() for buffer in buffers] for buffers in rows]
        for buffer in (*rows[0], *rows[1]):
            buffer.zero_()  # whoever began it may overwrite them
        extents = end()
    else:
        before = [[buffer.clone() for buffer in buffers] for buffers in rows]
        extents = copier.save(slots, layout, arena, runs, codec=codec)
    assert [extent.num_bytes for extent in extents] == sizes and not copier.is_in_place(codec)
    for extent in extents:
        check_extent(extent, arena.buffers(runs, extent.offset, extent.num_bytes))
    coder = coder_of(codec)
    target = torch.randperm(150)[:33]
    for layer in range(2):
        keys, values = (before[which][layer][slots].flatten(1) for which in (0, 1))
        stored = torch.empty(sizes[layer], dtype=torch.uint8)
        coder.encode(keys, values, stored)
        coder.decode(stored, 70, 0, keys, values)
        copier.load_layers(range(layer, layer + 1), target, arena, runs, extents, 20, 70, codec)
        pair = copier.read_layer(layer, arena, runs, extents[layer], 20, 33, 70, codec)
        for expected, found, buffers in zip((keys, values), pair, rows, strict=True):
            assert torch.equal(buffers[layer][target].flatten(1), expected[20:53])
            assert torch.equal(found.flatten(1), expected[20:53])


def test_what_is_not_finite_is_not_stored_by_a_codec() -> None:
    rows = [[torch.full((40, 1, 8), torch.nan)] for _ in range(2)]
    copier, arena = PayloadCopier(*rows, 1), Arena(1 << 16)
    with pytest.raises(NotFiniteError):
        copier.save(torch.arange(40), None, arena, arena.extents.alloc(1 << 14), codec="int4")
