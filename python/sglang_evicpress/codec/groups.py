"""Asymmetric integers in groups: int8, int4 and int2.

Keys are quantised per channel over groups of slots, values per token over groups of channels (KIVI, arXiv 2402.02750,
section 3; AdaptCache takes the same codec). Keys are those of the pool, after RoPE. Of a group its least and greatest
value are stored in the pool's dtype, and one code a value, which stands for ``greatest * t + least * (1 - t)`` with
``t = code / levels``. Both ends come back bit for bit, and so a decoded group encodes to the same bytes; with a rounded
scale in place of the greatest value, as KIVI has it, it would not. A value comes back within half of what lies between
two codes, and the rounding to the pool's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from sglang_evicpress.codec.base import NotFiniteError
from sglang_evicpress.codec.layout import GROUP, HEADER, GroupLayout, stored_layout

SMALL, GREAT = 2.0**-76, 2.0**119
"""Ends of groups beyond which float32 has no scale for them: their values are multiplied by a power of two before."""
SMALL_FACTOR, GREAT_FACTOR = 2.0**100, 0.25
NARROW = 2.0**-12
"""Of the size of a float32 group's values: between ends that are nearer, sums in float32 are too coarse for codes."""
_CHUNK_VALUES = 1 << 18  # worked on at once: fewer are outweighed by the calls, more leave a core's cache


@dataclass(frozen=True, slots=True)
class _Parts:
    """Tensors over the bytes of one layer."""

    key_ends: torch.Tensor  # [2, groups, 1, channels]
    value_ends: torch.Tensor  # [2, quantised slots, groups of channels, 1]
    raw_keys: torch.Tensor  # [slots - slots in groups, channels]
    raw_values: torch.Tensor  # [slots - quantised slots, channels]
    key_codes: torch.Tensor  # uint8 [groups, group / codes of a byte, channels]
    value_codes: torch.Tensor  # uint8 [quantised slots, channels / codes of a byte, 1]


def _parts(layout: GroupLayout, dtype: torch.dtype, stored: torch.Tensor) -> _Parts:
    found, at = [], HEADER.size
    for shape, item_bytes in layout.extents():
        end = at + prod(shape) * item_bytes
        found.append(stored[at:end].view(dtype if item_bytes == dtype.itemsize else torch.uint8).view(shape))
        at = end
    return _Parts(*found)


class GroupCodec:
    """``bits`` are those of a code: 8, 4 or 2. Groups of ``group`` slots begin at slot 0. The keys of the slots behind
    the last whole group stay raw, and so do keys and values of the newest ``window`` slots. Groups of channels have
    ``group`` channels, or the greatest common divisor of that and of the channels."""

    def __init__(self, bits: int, *, group: int = GROUP, window: int = 0) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(f"codes have {bits} bits: expected 2, 4 or 8")
        if group % 8 or not 8 <= group < 1 << 16:
            raise ValueError(f"group is {group}: expected a multiple of 8 from 8 to 65528")
        if not 0 <= window < 1 << 32:
            raise ValueError(f"window is {window}: expected 0 to 2**32 - 1")
        self.name = f"int{bits}"
        self._bits, self._group, self._window = bits, group, window

    def num_bytes(self, num_slots: int, num_channels: int, dtype: torch.dtype) -> int:
        """See ``Codec``."""
        return GroupLayout(self._bits, self._group, self._window, num_slots, num_channels, dtype.itemsize).num_bytes

    def encode(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Codec``."""
        num_slots, num_channels = keys.shape
        layout = GroupLayout(self._bits, self._group, self._window, num_slots, num_channels, keys.dtype.itemsize)
        out[: HEADER.size] = torch.frombuffer(bytearray(layout.header()), dtype=torch.uint8)
        parts = _parts(layout, keys.dtype, out)
        parts.raw_keys.copy_(keys[layout.num_grouped :])
        parts.raw_values.copy_(values[layout.num_quantised :])
        if not (parts.raw_keys.isfinite().all() and parts.raw_values.isfinite().all()):
            raise NotFiniteError("rows hold NaN or Inf")
        for at, to in _chunks(layout.num_groups, layout.group * layout.num_channels):
            rows = keys[at * layout.group : to * layout.group].float().view(to - at, layout.group, -1)
            parts.key_ends[:, at:to], codes = _quantised(rows, 1, self._bits)
            _pack(codes, self._bits, parts.key_codes[at:to])
        for at, to in _chunks(layout.num_quantised, layout.num_channels):
            rows = values[at:to].float().view(to - at, -1, layout.values_group)
            parts.value_ends[:, at:to], codes = _quantised(rows, 2, self._bits)
            _pack(codes.view(to - at, -1, 1), self._bits, parts.value_codes[at:to])

    def decode(
        self, stored: torch.Tensor, num_slots: int, begin: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """See ``Codec``."""
        expected = GroupLayout(self._bits, self._group, self._window, num_slots, keys.shape[1], keys.dtype.itemsize)
        layout = stored_layout(bytes(stored[: HEADER.size].tolist()), len(stored), expected)
        self.decode_rows(stored, layout, begin, keys, values)

    def decode_rows(
        self, stored: torch.Tensor, layout: GroupLayout, begin: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """``decode`` of a layer of which the layout is known; its header is not read."""
        parts, end = _parts(layout, keys.dtype, stored), begin + len(keys)
        _put(parts.raw_keys, layout.num_grouped - begin, keys)
        _put(parts.raw_values, layout.num_quantised - begin, values)
        first = begin // layout.group
        last = -(-min(end, layout.num_grouped) // layout.group)
        for at, to in _chunks(last - first, layout.group * layout.num_channels):
            chunk = slice(first + at, first + to)
            rows = _dequantised(
                _unpacked(parts.key_codes[chunk], self._bits), parts.key_ends[:, chunk], self._bits, keys.dtype
            )
            _put(rows.view(-1, layout.num_channels), chunk.start * layout.group - begin, keys)
        for at, to in _chunks(min(end, layout.num_quantised) - begin, layout.num_channels):
            chunk = slice(begin + at, begin + to)
            codes = _unpacked(parts.value_codes[chunk], self._bits).view(to - at, -1, layout.values_group)
            rows = _dequantised(codes, parts.value_ends[:, chunk], self._bits, values.dtype)
            values[at:to] = rows.view(to - at, -1)


def _chunks(count: int, num_values: int) -> Iterator[tuple[int, int]]:
    """Ranges over ``count`` pieces of ``num_values`` each."""
    at_once = max(1, _CHUNK_VALUES // num_values)
    for at in range(0, count, at_once):
        yield at, min(at + at_once, count)


def _quantised(rows: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends, [2, ...] with ``dim`` of size 1, and codes, uint8, of the groups along ``dim`` of ``rows``, float32."""
    ends = torch.stack([rows.amin(dim, keepdim=True), rows.amax(dim, keepdim=True)]) + 0.0  # no negative zero
    if not ends.isfinite().all():
        raise NotFiniteError("rows hold NaN or Inf")
    levels = (1 << bits) - 1
    least, greatest = ends
    size = torch.maximum(-least, greatest)
    is_small, is_great = size < SMALL, size > GREAT
    if (is_small | is_great).any():
        factor = torch.ones_like(size).masked_fill_(is_small, SMALL_FACTOR).masked_fill_(is_great, GREAT_FACTOR)
        rows, least, greatest = rows * factor, least * factor, greatest * factor
    scale = ((greatest - least).reciprocal() * levels).masked_fill_(least == greatest, 0.0)
    return ends, (rows - least).mul_(scale).round_().to(torch.int32).to(torch.uint8)


def _dequantised(codes: torch.Tensor, ends: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of ``codes``, float32, which are overwritten."""
    least, greatest = ends.float()
    share = codes.mul_(1 / ((1 << bits) - 1))
    if dtype != torch.float32:
        return (1.0 - share).mul_(least).add_(share.mul_(greatest)).to(dtype)
    width = greatest.double() - least
    is_narrow = width < NARROW * torch.maximum(-least, greatest).double()
    near = least + share.double() * width if is_narrow.any() else None
    found = (1.0 - share).mul_(least).add_(share.mul_(greatest))
    if near is not None:
        found = torch.where(is_narrow, near.float(), found)
    return torch.maximum(torch.minimum(found, greatest), least)  # rounding takes nothing back


def _pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Codes [a, n, c] as bytes [a, n / codes of a byte, c]: byte j holds code j in its lowest bits."""
    num_bytes = out.shape[1]
    out.copy_(codes[:, :num_bytes])
    for part in range(1, 8 // bits):
        out.bitwise_or_(codes[:, part * num_bytes : (part + 1) * num_bytes] << part * bits)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as float32 of what ``_pack`` wrote."""
    if bits == 8:
        return packed.float()
    count, num_bytes, width = packed.shape
    codes = torch.empty((count, num_bytes * 8 // bits, width), device=packed.device)
    for part in range(8 // bits):
        codes[:, part * num_bytes : (part + 1) * num_bytes] = packed >> part * bits & (1 << bits) - 1
    return codes


def _put(rows: torch.Tensor, at: int, out: torch.Tensor) -> None:
    """Copy those of ``rows`` that lie in ``out``, in which the first of them would be row ``at``."""
    begin, end = max(0, at), min(len(out), at + len(rows))
    if begin < end:
        out[begin:end] = rows[begin - at : end - at]
