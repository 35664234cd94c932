"""Codecs int8, int4 and int2 on a device: rows of the pool to what a tier keeps of them, and back, in one pass each.

The bytes are those of ``codec.groups``, bit for bit: minimum and maximum, one correctly rounded division a group, and
for each value sums and products that are rounded one by one (the compiler may not fuse them) in the same order. Codes
are rounded half to even by adding 2**23. Headers of layers are the host's to write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.codec.base import NotFiniteError
from sglang_evicpress.codec.groups import GREAT, GREAT_FACTOR, NARROW, SMALL, SMALL_FACTOR, GroupCodec
from sglang_evicpress.codec.layout import GroupLayout
from sglang_evicpress.kernels.pool import (
    ACCESS_BYTES,
    TRITON_DTYPES,
    Backend,
    PoolShape,
    check_flag,
    check_pools,
    check_stored,
    layer_pointer,
    runs_triton,
)
from sglang_evicpress.kernels.stage import stage_table

_SMALL, _GREAT = tl.constexpr(SMALL), tl.constexpr(GREAT)
_SMALL_FACTOR, _GREAT_FACTOR = tl.constexpr(SMALL_FACTOR), tl.constexpr(GREAT_FACTOR)
_NARROW = tl.constexpr(NARROW)
_ROUNDER = tl.constexpr(2.0**23)  # a float32 from here on has no bits behind the point, and its lowest ones are a code
_ROUNDER_BITS = tl.constexpr(0x4B000000)

_MOST_GROUP = 256
_KEYS_TILE, _VALUES_TILE, _ROW_BYTES = 4096, 2048, 512  # values, values, bytes of codes of a row: measured on an H200
# What differs from one entry to the next compiles no kernel anew while a load is waited for.
SIZES = ["num_slots", "num_coded", "ends_at", "raw_at", "codes_at", "layer_bytes", "begin", "num_rows"]


@triton.jit
def _floats(rows: tl.tensor) -> tl.tensor:
    # bfloat16 by its bits, here and below: the interpreter loses its subnormals and does not round.
    if rows.dtype == tl.bfloat16:
        return (rows.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return rows.to(tl.float32)


@triton.jit
def _rounded(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    if tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def _codes(values: tl.tensor, least: tl.tensor, greatest: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    # Of a group that holds NaN or Inf some are far above LEVELS: the bits of NaN are not the rounder's and a code.
    size = tl.maximum(-least, greatest)
    factor = tl.where(size < _SMALL, _SMALL_FACTOR, tl.where(size > _GREAT, _GREAT_FACTOR, 1.0))
    least = least * factor
    width = greatest * factor - least
    reciprocal = tl.div_rn(tl.full(width.shape, 1.0, tl.float32), tl.where(width == 0, 1.0, width))
    scale = tl.where(width == 0, 0.0, reciprocal * LEVELS)
    steps = (values * factor - least) * scale
    return (steps + _ROUNDER).to(tl.uint32, bitcast=True) - _ROUNDER_BITS


@triton.jit
def _values(
    codes: tl.tensor, least: tl.tensor, greatest: tl.tensor, LEVELS: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    share = codes.to(tl.float32) * (1 / LEVELS)
    found = (1.0 - share) * least + share * greatest
    if tl.float32 == DTYPE:  # where rounding takes nothing back
        width = greatest.to(tl.float64) - least.to(tl.float64)
        near = (least.to(tl.float64) + share.to(tl.float64) * width).to(tl.float32)
        is_narrow = width < tl.maximum(-least, greatest).to(tl.float64) * _NARROW
        found = tl.where(is_narrow, near, found)
        found = tl.maximum(tl.minimum(found, greatest), least)
    return _rounded(found, DTYPE)


@triton.jit
def _part_pointer(stored: tl.tensor, at: tl.tensor, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr) -> tl.tensor:
    return tl.multiple_of((stored + at).to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["slots", "flag"])
def _encode_keys_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    flag: tl.tensor,
    num_slots: tl.tensor,
    num_coded: tl.tensor,
    ends_at: tl.tensor,
    raw_at: tl.tensor,
    codes_at: tl.tensor,
    layer_bytes: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    # One program: one group of slots of some channels, or as many raw rows behind the last group.
    PER_BYTE: tl.constexpr = 8 // BITS
    PART: tl.constexpr = GROUP // PER_BYTE  # code i of a group lies in byte i % PART
    group = tl.program_id(0)
    layer = tl.program_id(2)
    rows = layer_pointer(table, 2 * layer, DTYPE)
    stored += layer.to(tl.int64) * layer_bytes
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < NUM_CHANNELS
    bytes_of_group = tl.arange(0, PART)
    parts = tl.arange(0, PER_BYTE)[None, :, None]  # in the middle: one thread has all parts of a byte
    tokens = group * GROUP + parts * PART + bytes_of_group[:, None, None]
    mask = (tokens < num_slots) & is_channel[None, None, :]
    slot = tl.load(slots + tokens, mask=tokens < num_slots, other=0).to(tl.int64)
    tile = tl.load(rows + slot * NUM_CHANNELS + channels[None, None, :], mask=mask, other=0.0)
    values = _floats(tile)
    if (group + 1) * GROUP <= num_coded:
        least = tl.min(tl.min(values, 1), 0) + 0.0  # no negative zero
        greatest = tl.max(tl.max(values, 1), 0) + 0.0
        ends = _part_pointer(stored, ends_at, DTYPE, ALIGNMENT) + group.to(tl.int64) * NUM_CHANNELS + channels
        tl.store(ends, _rounded(least, DTYPE), mask=is_channel)
        tl.store(ends + num_coded.to(tl.int64) // GROUP * NUM_CHANNELS, _rounded(greatest, DTYPE), mask=is_channel)
        codes = _codes(values, least[None, None, :], greatest[None, None, :], (1 << BITS) - 1)
        packed = tl.sum(codes << parts * BITS, 1)
        tl.store(flag, 1, mask=tl.max(tl.max(packed, 1), 0) > 255)
        place = (group.to(tl.int64) * PART + bytes_of_group[:, None]) * NUM_CHANNELS + channels[None, :]
        target = _part_pointer(stored, codes_at, tl.uint8, ALIGNMENT) + place
        tl.store(target, packed.to(tl.uint8), mask=is_channel[None, :])
    else:
        is_odd = (~(tl.abs(values) < float("inf"))).to(tl.int32)
        tl.store(flag, 1, mask=tl.max(tl.max(tl.max(is_odd, 2), 1), 0) > 0)
        raw_place = (tokens - num_coded).to(tl.int64) * NUM_CHANNELS + channels[None, None, :]
        tl.store(_part_pointer(stored, raw_at, DTYPE, ALIGNMENT) + raw_place, tile, mask=mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["slots", "flag"])
def _encode_values_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    flag: tl.tensor,
    num_slots: tl.tensor,
    num_coded: tl.tensor,
    ends_at: tl.tensor,
    raw_at: tl.tensor,
    codes_at: tl.tensor,
    layer_bytes: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    # One program: some slots, of each some bytes of codes, and the groups of channels that these are of.
    PER_BYTE: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = NUM_CHANNELS // GROUP
    PART_GROUPS: tl.constexpr = NUM_GROUPS // PER_BYTE  # code i of a row lies in byte i % (PART_GROUPS * GROUP)
    layer = tl.program_id(2)
    rows = layer_pointer(table, 2 * layer + 1, DTYPE)
    stored += layer.to(tl.int64) * layer_bytes
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    slot = tl.load(slots + tokens, mask=tokens < num_slots, other=0).to(tl.int64)
    row = tokens.to(tl.int64)
    is_coded = (tokens < num_coded)[:, None] & (groups < PART_GROUPS)[None, :]
    is_inside = (tokens < num_slots)[:, None] & (groups < PART_GROUPS)[None, :]
    is_raw = is_inside & (tokens >= num_coded)[:, None]
    channels = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ends = _part_pointer(stored, ends_at, DTYPE, ALIGNMENT) + row[:, None] * NUM_GROUPS + groups[None, :]
    raw = _part_pointer(stored, raw_at, DTYPE, ALIGNMENT)
    packed = tl.zeros((BLOCK_TOKENS, BLOCK_GROUPS, GROUP), tl.uint32)
    for part in tl.static_range(PER_BYTE):
        here = (part * PART_GROUPS * GROUP + channels)[None, :, :]
        tile = tl.load(rows + slot[:, None, None] * NUM_CHANNELS + here, mask=is_inside[:, :, None], other=0.0)
        values = _floats(tile)
        least = tl.min(values, 2) + 0.0  # no negative zero
        greatest = tl.max(values, 2) + 0.0
        tl.store(ends + part * PART_GROUPS, _rounded(least, DTYPE), mask=is_coded)
        place = num_coded.to(tl.int64) * NUM_GROUPS + part * PART_GROUPS
        tl.store(ends + place, _rounded(greatest, DTYPE), mask=is_coded)
        tl.store(raw + (row - num_coded)[:, None, None] * NUM_CHANNELS + here, tile, mask=is_raw[:, :, None])
        packed |= _codes(values, least[:, :, None], greatest[:, :, None], (1 << BITS) - 1) << part * BITS
    tl.store(flag, 1, mask=tl.max(tl.max(tl.max(packed, 2), 1), 0) > 255)
    codes = _part_pointer(stored, codes_at, tl.uint8, ALIGNMENT)
    place = row[:, None, None] * (NUM_CHANNELS // PER_BYTE) + channels[None, :, :]
    tl.store(codes + place, packed.to(tl.uint8), mask=is_coded[:, :, None])


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["slots"])
def _decode_keys_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    begin: tl.tensor,
    num_rows: tl.tensor,
    num_coded: tl.tensor,
    ends_at: tl.tensor,
    raw_at: tl.tensor,
    codes_at: tl.tensor,
    layer_bytes: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    PER_BYTE: tl.constexpr = 8 // BITS
    PART: tl.constexpr = GROUP // PER_BYTE
    group = begin // GROUP + tl.program_id(0)
    layer = tl.program_id(2)
    rows = layer_pointer(table, 2 * layer, DTYPE)
    stored += layer.to(tl.int64) * layer_bytes
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < NUM_CHANNELS
    parts = tl.arange(0, PER_BYTE)[:, None, None]
    bytes_of_group = tl.arange(0, PART)
    tokens = group * GROUP + parts * PART + bytes_of_group[None, :, None]
    is_wanted = (tokens >= begin) & (tokens < begin + num_rows)
    mask = is_wanted & is_channel[None, None, :]
    slot = tl.load(slots + tokens - begin, mask=is_wanted, other=0).to(tl.int64)
    target = rows + slot * NUM_CHANNELS + channels[None, None, :]
    if (group + 1) * GROUP <= num_coded:
        ends = _part_pointer(stored, ends_at, DTYPE, ALIGNMENT) + group.to(tl.int64) * NUM_CHANNELS + channels
        least = _floats(tl.load(ends, mask=is_channel, other=0.0))[None, None, :]
        ends += num_coded.to(tl.int64) // GROUP * NUM_CHANNELS
        greatest = _floats(tl.load(ends, mask=is_channel, other=0.0))[None, None, :]
        place = (group.to(tl.int64) * PART + bytes_of_group[:, None]) * NUM_CHANNELS + channels[None, :]
        codes = _part_pointer(stored, codes_at, tl.uint8, ALIGNMENT)
        packed = tl.load(codes + place, mask=is_channel[None, :], other=0).to(tl.int32)
        found = packed[None, :, :] >> parts * BITS & ((1 << BITS) - 1)
        tl.store(target, _values(found, least, greatest, (1 << BITS) - 1, DTYPE), mask=mask)
    else:
        raw_place = (tokens - num_coded).to(tl.int64) * NUM_CHANNELS + channels[None, None, :]
        raw = _part_pointer(stored, raw_at, DTYPE, ALIGNMENT)
        tl.store(target, tl.load(raw + raw_place, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["slots"])
def _decode_values_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    begin: tl.tensor,
    num_rows: tl.tensor,
    num_coded: tl.tensor,
    ends_at: tl.tensor,
    raw_at: tl.tensor,
    codes_at: tl.tensor,
    layer_bytes: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    PER_BYTE: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = NUM_CHANNELS // GROUP
    PART_GROUPS: tl.constexpr = NUM_GROUPS // PER_BYTE
    layer = tl.program_id(2)
    rows = layer_pointer(table, 2 * layer + 1, DTYPE)
    stored += layer.to(tl.int64) * layer_bytes
    index = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    slot = tl.load(slots + index, mask=index < num_rows, other=0).to(tl.int64)
    row = begin + index.to(tl.int64)
    is_inside = (index < num_rows)[:, None] & (groups < PART_GROUPS)[None, :]
    is_coded = is_inside & (row < num_coded)[:, None]
    is_raw = (is_inside & (row >= num_coded)[:, None])[:, :, None]
    channels = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ends = _part_pointer(stored, ends_at, DTYPE, ALIGNMENT) + row[:, None] * NUM_GROUPS + groups[None, :]
    raw = _part_pointer(stored, raw_at, DTYPE, ALIGNMENT)
    codes = _part_pointer(stored, codes_at, tl.uint8, ALIGNMENT)
    place = row[:, None, None] * (NUM_CHANNELS // PER_BYTE) + channels[None, :, :]
    packed = tl.load(codes + place, mask=is_coded[:, :, None], other=0).to(tl.int32)
    for part in tl.static_range(PER_BYTE):
        here = (part * PART_GROUPS * GROUP + channels)[None, :, :]
        least = _floats(tl.load(ends + part * PART_GROUPS, mask=is_coded, other=0.0))[:, :, None]
        upper = ends + num_coded.to(tl.int64) * NUM_GROUPS + part * PART_GROUPS
        greatest = _floats(tl.load(upper, mask=is_coded, other=0.0))[:, :, None]
        found = _values(packed >> part * BITS & ((1 << BITS) - 1), least, greatest, (1 << BITS) - 1, DTYPE)
        kept = tl.load(raw + (row - num_coded)[:, None, None] * NUM_CHANNELS + here, mask=is_raw, other=0.0)
        target = rows + slot[:, None, None] * NUM_CHANNELS + here
        tl.store(target, tl.where(is_raw, kept, found), mask=is_inside[:, :, None])


def encode(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: GroupLayout,
    out: Tensor,
    flag: Tensor,
    *,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write every layer's K and V of ``slots`` to its row of ``out``, uint8 ``[num_layers, layout.num_bytes]``, all but
    the header, and 1 to ``flag``, int32 ``[1]``, where some are NaN or Inf.

    ``layout`` is that of these slots; ``table`` as in ``stage.gather``. Raises ValueError for tensors that do not fit,
    and as ``check_pool``, ``pointer_table`` and ``runs_triton`` do.
    """
    pool = _check(k_buffers, v_buffers, slots, layout, out, table)
    check_flag(pool, flag)
    if len(slots) != layout.num_slots:
        raise ValueError(f"there are {len(slots)} slots: expected the layout's {layout.num_slots}")
    if not runs_triton(backend, pool.device) or not _is_aligned(layout):
        encode_torch(k_buffers, v_buffers, slots, layout, out, flag)
        return
    if not layout.num_slots:
        return
    table = stage_table(k_buffers, v_buffers) if table is None else table
    keys, values = group_constants(layout, pool.dtype)
    key_places, value_places = _places(layout)
    given = table, slots.contiguous(), out, flag, layout.num_slots
    _encode_keys_kernel[_keys_grid(pool, keys, 0, layout.num_slots)](*given, *key_places, **keys)
    _encode_values_kernel[_values_grid(pool, values, layout, layout.num_slots)](*given, *value_places, **values)


def decode(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: GroupLayout,
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
    if not runs_triton(backend, pool.device) or not _is_aligned(layout):
        decode_torch(k_buffers, v_buffers, slots, layout, stored, begin)
        return
    if not len(slots):
        return
    table = stage_table(k_buffers, v_buffers) if table is None else table
    keys, values = group_constants(layout, pool.dtype)
    key_places, value_places = _places(layout)
    given = table, slots.contiguous(), stored, begin, len(slots)
    _decode_keys_kernel[_keys_grid(pool, keys, begin, begin + len(slots))](*given, *key_places, **keys)
    _decode_values_kernel[_values_grid(pool, values, layout, len(slots))](*given, *value_places, **values)


def encode_torch(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: GroupLayout,
    out: Tensor,
    flag: Tensor,
) -> None:
    """Reference of ``encode``, and its path on the CPU and for groups that the kernels do not know."""
    codec = GroupCodec(layout.bits, group=layout.group, window=layout.window)
    for k_buffer, v_buffer, layer in zip(k_buffers, v_buffers, out, strict=True):
        keys, values = (buffer.index_select(0, slots).flatten(1) for buffer in (k_buffer, v_buffer))
        stored = torch.empty_like(layer)  # a layer behind others may begin where no raw value can
        try:
            codec.encode(keys, values, stored)
        except NotFiniteError:
            flag.fill_(1)
        layer.copy_(stored)


def decode_torch(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: GroupLayout,
    stored: Tensor,
    begin: int,
) -> None:
    """Reference of ``decode``, and its path on the CPU and for groups that the kernels do not know."""
    codec = GroupCodec(layout.bits, group=layout.group, window=layout.window)
    for k_buffer, v_buffer, layer in zip(k_buffers, v_buffers, stored, strict=True):
        keys, values = (buffer.new_empty((len(slots), *buffer.shape[1:])) for buffer in (k_buffer, v_buffer))
        codec.decode_rows(layer.clone(), layout, begin, keys.flatten(1), values.flatten(1))
        k_buffer.index_copy_(0, slots, keys)
        v_buffer.index_copy_(0, slots, values)


def group_constants(layout: GroupLayout, dtype: torch.dtype) -> tuple[dict[str, object], dict[str, object]]:
    """Launch constants for keys and for values. One warp to a tile: it finds the ends of groups in its registers and by
    few shuffles, where more warps would wait for each other."""
    values_bytes = layout.num_channels * layout.bits // 8
    # However many slots there are, every part of a layer begins at a multiple of it.
    ends_bytes = 2 * layout.num_channels // layout.values_group * layout.item_bytes
    both = {
        "NUM_CHANNELS": layout.num_channels,
        "BITS": layout.bits,
        "DTYPE": TRITON_DTYPES[dtype],
        "ALIGNMENT": math.gcd(ACCESS_BYTES, ends_bytes, values_bytes),
        "num_warps": 1,
        "enable_fp_fusion": False,
    }
    channels = min(_power_of_two(layout.num_channels), _KEYS_TILE // layout.group)
    groups = min(_power_of_two(values_bytes // layout.values_group), max(1, _ROW_BYTES // layout.values_group))
    tokens = max(1, _VALUES_TILE * layout.bits // 8 // (groups * layout.values_group))
    return (
        {"GROUP": layout.group, "BLOCK_CHANNELS": channels, **both},
        {"GROUP": layout.values_group, "BLOCK_TOKENS": tokens, "BLOCK_GROUPS": groups, **both},
    )


def _is_aligned(layout: GroupLayout) -> bool:
    """True if the kernels know such groups: a power of two, and no byte of values holds codes of half a group."""
    is_power = layout.group & (layout.group - 1) == 0 and layout.group <= _MOST_GROUP
    return is_power and layout.num_channels % (layout.values_group * 8 // layout.bits) == 0


def _places(layout: GroupLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For keys and for values: rows with codes, where their ends, raw rows and codes begin, bytes of a layer."""
    key_ends, value_ends, raw_keys, raw_values, key_codes, value_codes = layout.places()
    return (
        (layout.num_grouped, key_ends, raw_keys, key_codes, layout.num_bytes),
        (layout.num_quantised, value_ends, raw_values, value_codes, layout.num_bytes),
    )


def _keys_grid(pool: PoolShape, keys: dict[str, object], begin: int, end: int) -> tuple[int, ...]:
    groups = triton.cdiv(end, keys["GROUP"]) - begin // int(str(keys["GROUP"]))
    return groups, triton.cdiv(keys["NUM_CHANNELS"], keys["BLOCK_CHANNELS"]), pool.num_layers


def _values_grid(pool: PoolShape, values: dict[str, object], layout: GroupLayout, count: int) -> tuple[int, ...]:
    groups = layout.num_channels * layout.bits // 8 // layout.values_group
    return triton.cdiv(count, values["BLOCK_TOKENS"]), triton.cdiv(groups, values["BLOCK_GROUPS"]), pool.num_layers


def _check(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    layout: GroupLayout,
    stored: Tensor,
    table: Tensor | None,
) -> PoolShape:
    pool = check_pools(k_buffers, v_buffers, slots)
    if (layout.num_channels, layout.item_bytes) != (pool.num_heads * pool.head_dim, pool.dtype.itemsize):
        raise ValueError(
            f"layout has {layout.num_channels} channels of {layout.item_bytes} bytes: expected "
            f"{pool.num_heads * pool.head_dim} of {pool.dtype.itemsize}"
        )
    check_stored(pool, stored, layout.num_bytes, table)
    return pool


def _power_of_two(count: int) -> int:
    """The least one that is not below ``count``."""
    return 1 << (count - 1).bit_length()
