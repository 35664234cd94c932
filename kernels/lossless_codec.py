"""Codec lossless on a device: rows of the pool to what a tier keeps of them, and back, in one launch for K and V.

The bytes are those of ``codec.lossless``, bit for bit. One program has a block of K or of V: the place of an escape is
the number of those before it in the block, so it takes some rows at a time and carries the count along. Headers of
layers are the host's to write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.codec.base import DoesNotFitError, NotFiniteError
from sglang_evicpress.codec.layout import GROUP, HEADER, LosslessLayout
from sglang_evicpress.codec.lossless import CODEC, ZERO
from sglang_evicpress.kernels.pool import (
    ACCESS_BYTES,
    Backend,
    PoolShape,
    check_flag,
    check_pools,
    check_stored,
    layer_pointer,
    runs_triton,
)
from sglang_evicpress.kernels.stage import stage_table

NOT_FINITE, NO_ROOM = 1, 2
"""Bits of the flag: rows hold NaN or Inf; a block has more escapes than room."""

_GROUP, _HEADER_BYTES, _ZERO = tl.constexpr(GROUP), tl.constexpr(HEADER.size), tl.constexpr(ZERO)
_NOT_FINITE, _NO_ROOM = tl.constexpr(NOT_FINITE), tl.constexpr(NO_ROOM)
_TILE_BYTES = 2048  # of codes; a warp has 512, so that a thread stores 16 bytes at once
_WARP_BYTES = 512
_MOST_WARPS = 16
# What differs from one entry to the next compiles no kernel anew while a load is waited for.
SIZES = ["num_slots", "begin", "num_rows"]


@triton.jit
def _section_pointers(
    stored: tl.tensor,
    section: tl.tensor,
    block: tl.tensor,
    num_slots: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # A block of one of K and V, uint8, and where its raw rows would begin if the first of them were slot 0, int16.
    BLOCK_BYTES: tl.constexpr = _GROUP + (_GROUP + _GROUP // 2 + 1) * NUM_CHANNELS
    num_blocks = (num_slots // _GROUP).to(tl.int64)
    num_raw = num_slots - num_blocks * _GROUP
    raw_at = _HEADER_BYTES + 2 * num_blocks * BLOCK_BYTES
    layer = stored + (section // 2) * (raw_at + 4 * num_raw * NUM_CHANNELS)
    place = layer + _HEADER_BYTES + (2 * block + section % 2).to(tl.int64) * BLOCK_BYTES
    raw = tl.multiple_of((layer + raw_at).to(tl.pointer_type(tl.int16)), ALIGNMENT)
    raw += ((section % 2) * num_raw - num_blocks * _GROUP) * NUM_CHANNELS
    return tl.multiple_of(place, ALIGNMENT), raw


@triton.jit
def _escape_codes(exponents: tl.tensor, top: tl.tensor) -> tl.tensor:
    below = top[:, None] - exponents
    return tl.where(below < _ZERO, below, tl.where(exponents == 0, _ZERO, _ZERO + 1))


@triton.jit
def _ranks(low: tl.tensor, high: tl.tensor, before: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    # The places of escapes: rows in their order, bytes in theirs, and of a byte the lower code first.
    both = low + high
    of_row = tl.sum(both, 1)
    rank = (before + tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(both, 1) - both
    return rank, rank + low


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["slots", "flag"])
def _encode_lossless_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    flag: tl.tensor,
    num_slots: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
) -> None:
    # table holds K and V of each layer by turns; one program: 32 slots of one of them, or the raw rows behind the last.
    HALF: tl.constexpr = NUM_CHANNELS // 2
    block = tl.program_id(0)
    section = tl.program_id(1)
    rows = layer_pointer(table, section, tl.int16)
    tops, raw = _section_pointers(stored, section, block, num_slots, NUM_CHANNELS, ALIGNMENT)
    rest = tops + _GROUP
    codes = rest + _GROUP * NUM_CHANNELS
    escaped = codes + _GROUP * HALF
    channels = tl.arange(0, BLOCK_BYTES)[None, :]
    is_coded = (block + 1) * _GROUP <= num_slots
    before = 0
    most = 0
    for first in range(0, _GROUP, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        token = block * _GROUP + row
        inside = token < num_slots
        mask = inside[:, None] & (channels < HALF)
        slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
        source = rows + slot[:, None] * NUM_CHANNELS + channels
        low_words = tl.load(source, mask=mask, other=0)
        high_words = tl.load(source + HALF, mask=mask, other=0)
        low = low_words.to(tl.int32) >> 7 & 255
        high = high_words.to(tl.int32) >> 7 & 255
        top = tl.maximum(tl.max(low, 1), tl.max(high, 1))
        most = tl.maximum(most, tl.max(top, 0))
        if is_coded:
            tl.store(tops + row, top.to(tl.uint8))
            place = rest + row[:, None] * NUM_CHANNELS + channels
            tl.store(place, (low_words & 127 | (low_words >> 8 & 128)).to(tl.uint8), mask=mask)
            tl.store(place + HALF, (high_words & 127 | (high_words >> 8 & 128)).to(tl.uint8), mask=mask)
            low_codes = _escape_codes(low, top)
            high_codes = _escape_codes(high, top)
            packed = (low_codes | high_codes << 4).to(tl.uint8)
            tl.store(codes + row[:, None] * HALF + channels, packed, mask=mask)
            is_low = (low_codes > _ZERO).to(tl.int32)
            is_high = (high_codes > _ZERO).to(tl.int32)
            count = tl.sum(tl.sum(is_low + is_high, 1), 0)
            if count > 0:
                low_rank, high_rank = _ranks(is_low, is_high, before)
                tl.store(escaped + low_rank, low.to(tl.uint8), mask=(is_low > 0) & (low_rank < NUM_CHANNELS))
                tl.store(escaped + high_rank, high.to(tl.uint8), mask=(is_high > 0) & (high_rank < NUM_CHANNELS))
            before += count
        else:
            raw_place = raw + token[:, None].to(tl.int64) * NUM_CHANNELS + channels
            tl.store(raw_place, low_words, mask=mask)
            tl.store(raw_place + HALF, high_words, mask=mask)
    if is_coded:
        free = tl.arange(0, 2 * BLOCK_BYTES)
        none = tl.zeros((2 * BLOCK_BYTES,), tl.uint8)
        tl.store(escaped + free, none, mask=(free >= before) & (free < NUM_CHANNELS))
    if most == 255:
        tl.atomic_or(flag, _NOT_FINITE)
    elif before > NUM_CHANNELS:
        tl.atomic_or(flag, _NO_ROOM)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["slots"])
def _decode_lossless_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    num_slots: tl.tensor,
    begin: tl.tensor,
    num_rows: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
) -> None:
    HALF: tl.constexpr = NUM_CHANNELS // 2
    block = begin // _GROUP + tl.program_id(0)
    section = tl.program_id(1)
    rows = layer_pointer(table, section, tl.int16)
    tops, raw = _section_pointers(stored, section, block, num_slots, NUM_CHANNELS, ALIGNMENT)
    rest = tops + _GROUP
    codes = rest + _GROUP * NUM_CHANNELS
    escaped = codes + _GROUP * HALF
    channels = tl.arange(0, BLOCK_BYTES)[None, :]
    is_coded = (block + 1) * _GROUP <= num_slots
    before = 0
    for first in range(0, _GROUP, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        token = block * _GROUP + row
        is_wanted = (token >= begin) & (token < begin + num_rows)
        mask = is_wanted[:, None] & (channels < HALF)
        slot = tl.load(slots + token - begin, mask=is_wanted, other=0).to(tl.int64)
        target = rows + slot[:, None] * NUM_CHANNELS + channels
        if is_coded:
            # The codes of all rows are read, also of those that nobody wants: their escapes are counted.
            is_channel = tl.full((BLOCK_ROWS, 1), 1, tl.int1) & (channels < HALF)
            packed = tl.load(codes + row[:, None] * HALF + channels, mask=is_channel, other=0).to(tl.int32)
            top = tl.load(tops + row).to(tl.int32)[:, None]
            place = rest + row[:, None] * NUM_CHANNELS + channels
            low_rest = tl.load(place, mask=mask, other=0).to(tl.int32)
            high_rest = tl.load(place + HALF, mask=mask, other=0).to(tl.int32)
            low_codes = packed & 15
            high_codes = packed >> 4
            low = tl.where(low_codes < _ZERO, top - low_codes & 255, 0)
            high = tl.where(high_codes < _ZERO, top - high_codes & 255, 0)
            is_low = (low_codes > _ZERO).to(tl.int32)
            is_high = (high_codes > _ZERO).to(tl.int32)
            count = tl.sum(tl.sum(is_low + is_high, 1), 0)
            if count > 0:
                # Bytes that no encoder writes stay within their block.
                low_rank, high_rank = _ranks(is_low, is_high, before)
                low_place = escaped + tl.minimum(low_rank, NUM_CHANNELS - 1)
                high_place = escaped + tl.minimum(high_rank, NUM_CHANNELS - 1)
                low += tl.load(low_place, mask=is_low > 0, other=0).to(tl.int32)
                high += tl.load(high_place, mask=is_high > 0, other=0).to(tl.int32)
            before += count
            low_words = (low << 7 | low_rest & 127 | (low_rest & 128) << 8).to(tl.int16)
            high_words = (high << 7 | high_rest & 127 | (high_rest & 128) << 8).to(tl.int16)
            tl.store(target, low_words, mask=mask)
            tl.store(target + HALF, high_words, mask=mask)
        else:
            raw_place = raw + token[:, None].to(tl.int64) * NUM_CHANNELS + channels
            tl.store(target, tl.load(raw_place, mask=mask, other=0), mask=mask)
            tl.store(target + HALF, tl.load(raw_place + HALF, mask=mask, other=0), mask=mask)


def encode(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: LosslessLayout,
    out: Tensor,
    flag: Tensor,
    *,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write every layer's K and V of ``slots`` to its row of ``out``, uint8 ``[num_layers, layout.num_bytes]``, all but
    the header, and add to ``flag``, int32 ``[1]``, the bits ``NOT_FINITE`` and ``NO_ROOM`` where they hold: ``out`` is
    of no use then, and one of them may hide the other.

    ``layout`` is that of these slots; ``table`` as in ``stage.gather``. Raises ValueError for tensors that do not fit,
    and as ``check_pool``, ``pointer_table`` and ``runs_triton`` do.
    """
    pool = _check(k_buffers, v_buffers, slots, layout, out, table)
    check_flag(pool, flag)
    if len(slots) != layout.num_slots:
        raise ValueError(f"there are {len(slots)} slots: expected the layout's {layout.num_slots}")
    constants = lossless_constants(layout.num_channels)
    if not runs_triton(backend, pool.device) or constants["num_warps"] > _MOST_WARPS:
        encode_torch(k_buffers, v_buffers, slots, layout, out, flag)
        return
    if not layout.num_slots:
        return
    table = stage_table(k_buffers, v_buffers) if table is None else table
    grid = triton.cdiv(layout.num_slots, GROUP), 2 * pool.num_layers
    _encode_lossless_kernel[grid](table, slots.contiguous(), out, flag, layout.num_slots, **constants)


def decode(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: LosslessLayout,
    stored: Tensor,
    begin: int,
    *,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write rows [begin, begin + len(slots)) of layers that are ``stored`` as ``encode`` does into ``slots``, in place;
    other slots keep their bytes. Headers are not read; ``slots`` holds no slot twice."""
    pool = _check(k_buffers, v_buffers, slots, layout, stored, table)
    if not 0 <= begin <= layout.num_slots - len(slots):
        raise ValueError(f"rows [{begin}, {begin + len(slots)}): expected a part of {layout.num_slots}")
    constants = lossless_constants(layout.num_channels)
    if not runs_triton(backend, pool.device) or constants["num_warps"] > _MOST_WARPS:
        decode_torch(k_buffers, v_buffers, slots, layout, stored, begin)
        return
    if not len(slots):
        return
    table = stage_table(k_buffers, v_buffers) if table is None else table
    grid = triton.cdiv(begin + len(slots), GROUP) - begin // GROUP, 2 * pool.num_layers
    given = table, slots.contiguous(), stored, layout.num_slots, begin, len(slots)
    _decode_lossless_kernel[grid](*given, **constants)


def encode_torch(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: LosslessLayout,
    out: Tensor,
    flag: Tensor,
) -> None:
    """Reference of ``encode``, and its path on the CPU and for rows of more channels than the kernels take."""
    for k_buffer, v_buffer, layer in zip(k_buffers, v_buffers, out, strict=True):
        keys, values = (buffer.index_select(0, slots).flatten(1) for buffer in (k_buffer, v_buffer))
        stored = torch.empty_like(layer)  # a layer behind others may begin where no raw value can
        try:
            CODEC.encode(keys, values, stored)
        except NotFiniteError:
            flag |= NOT_FINITE
        except DoesNotFitError:
            flag |= NO_ROOM
        layer.copy_(stored)


def decode_torch(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: LosslessLayout,
    stored: Tensor,
    begin: int,
) -> None:
    """Reference of ``decode``, and its path on the CPU and for rows of more channels than the kernels take."""
    for k_buffer, v_buffer, layer in zip(k_buffers, v_buffers, stored, strict=True):
        keys, values = (buffer.new_empty((len(slots), *buffer.shape[1:])) for buffer in (k_buffer, v_buffer))
        CODEC.decode_rows(layer.clone(), layout, begin, keys.flatten(1), values.flatten(1))
        k_buffer.index_copy_(0, slots, keys)
        v_buffer.index_copy_(0, slots, values)


def lossless_constants(num_channels: int) -> dict[str, int]:
    """Launch constants: tiles of whole rows, of about 2,048 bytes of codes."""
    columns = triton.next_power_of_2(num_channels // 2)
    rows = max(1, min(GROUP, _TILE_BYTES // columns))
    return {
        "NUM_CHANNELS": num_channels,
        "ALIGNMENT": math.gcd(ACCESS_BYTES, num_channels),  # however many slots there are, each part begins there
        "BLOCK_ROWS": rows,
        "BLOCK_BYTES": columns,
        "num_warps": max(1, rows * columns // _WARP_BYTES),
    }


def _check(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: LosslessLayout,
    stored: Tensor,
    table: Tensor | None,
) -> PoolShape:
    pool = check_pools(k_buffers, v_buffers, slots, dtypes=(torch.bfloat16,))
    num_channels = pool.num_heads * pool.head_dim
    if layout.num_channels != num_channels or num_channels % 8:
        raise ValueError(
            f"layout has {layout.num_channels} channels, the pool {num_channels}: expected as many, a multiple of 8"
        )
    check_stored(pool, stored, layout.num_bytes, table)
    return pool
