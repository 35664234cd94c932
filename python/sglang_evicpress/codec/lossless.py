"""bfloat16 in 12 bits, bit for bit.

Of a value sign and mantissa are stored as they are, in one byte. Its exponent is a code of 4 bits: 0 to 13, by how much
it lies below the greatest one of its row, 14 for zeros and subnormals, 15 for all others, which follow in the order of
their codes. SplitZip (arXiv 2605.01708) has one table of frequent exponents for a model instead, made beforehand; the
greatest one of a row needs no calibration. There is room for one escape in 32 values of a block.
"""

from __future__ import annotations

import torch

from sglang_evicpress.codec.base import DoesNotFitError, NotFiniteError
from sglang_evicpress.codec.layout import GROUP, HEADER, LosslessLayout

ZERO = 14  # the code of zeros and subnormals; 15 is that of an escape
_CHUNK_VALUES = 1 << 20  # worked on at once: an operation costs more than its values where there are fewer
_LOWEST_BITS = 0x1111111111111111  # of each code in 64 bits


class LosslessCodec:
    """The first code of a byte is that of a channel of the first half, the second that of the same one of the other."""

    name = "lossless"

    def num_bytes(self, num_slots: int, num_channels: int, dtype: torch.dtype) -> int:
        """See ``Codec``. Raises ValueError for another dtype than bfloat16."""
        if dtype != torch.bfloat16:
            raise ValueError(f"dtype is {dtype}: expected torch.bfloat16, which is all that codec lossless stores")
        return LosslessLayout(num_slots, num_channels).num_bytes

    def encode(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Codec``."""
        layout = LosslessLayout(*keys.shape)
        out[: HEADER.size] = torch.frombuffer(bytearray(layout.header()), dtype=torch.uint8)
        blocks, raw = _parts(layout, out)
        for which, rows in enumerate((keys, values)):
            raw[which] = rows[layout.num_coded :]
            if not raw[which].isfinite().all():
                raise NotFiniteError("rows hold NaN or Inf")
            words = rows[: layout.num_coded].view(torch.int16).unflatten(0, (-1, GROUP))
            at_once = _blocks_at_once(layout)
            for at in range(0, layout.num_blocks, at_once):
                _encode(words[at : at + at_once], blocks[at : at + at_once, which], layout)

    def decode(
        self, stored: torch.Tensor, num_slots: int, begin: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """See ``Codec``."""
        layout = LosslessLayout(num_slots, keys.shape[1])
        layout.check(bytes(stored[: HEADER.size].tolist()), len(stored))
        self.decode_rows(stored, layout, begin, keys, values)

    def decode_rows(
        self, stored: torch.Tensor, layout: LosslessLayout, begin: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """``decode`` of a layer of which the layout is known; its header is not read."""
        blocks, raw = _parts(layout, stored)
        end = begin + len(keys)
        coded_end = min(end, layout.num_coded)
        at_once = _blocks_at_once(layout)
        for which, rows in enumerate((keys, values)):
            if end > layout.num_coded:
                first = max(begin, layout.num_coded)
                rows[first - begin :] = raw[which, first - layout.num_coded : end - layout.num_coded]
            for at in range(begin // GROUP, -(-coded_end // GROUP), at_once):
                words = _decode(blocks[at : min(at + at_once, -(-coded_end // GROUP)), which], layout)
                here = at * GROUP
                first, last = max(begin, here), min(coded_end, here + len(words))
                rows[first - begin : last - begin].view(torch.int16).copy_(words[first - here : last - here])


def _blocks_at_once(layout: LosslessLayout) -> int:
    return max(1, _CHUNK_VALUES // (GROUP * layout.num_channels))


def _parts(layout: LosslessLayout, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, uint8 [blocks, K or V, bytes], and raw rows, bfloat16 [K or V, slots, channels]."""
    end = HEADER.size + 2 * layout.num_blocks * layout.block_bytes
    blocks = stored[HEADER.size : end].view(-1, 2, layout.block_bytes)
    return blocks, stored[end:].view(torch.bfloat16).view(2, -1, layout.num_channels)


def _encode(words: torch.Tensor, out: torch.Tensor, layout: LosslessLayout) -> None:
    """Write the blocks, uint8 [n, bytes], of ``words``, int16 [n, 32, channels]."""
    tops, rest, codes, escaped = out.split(layout.extents, 1)
    exponents = (words >> 7).to(torch.uint8)
    top = exponents.amax(2, keepdim=True)
    if (top == 255).any():
        raise NotFiniteError("rows hold NaN or Inf")
    tops.copy_(top.squeeze(2))
    rest.view(words.shape).copy_(torch.sub(words & 127, words >> 15, alpha=128))  # to bytes by their lowest 8 bits
    code = (top - exponents).clamp_(max=ZERO)
    code += code.clamp(min=ZERO - 1).sub_(ZERO - 1).bitwise_and_(exponents.clamp(max=1))
    half = layout.num_channels // 2
    packed = (code[..., half:] << 4).bitwise_or_(code[..., :half]).flatten(1)
    codes.copy_(packed)
    escaped.zero_()
    places, blocks, ranks = _escapes(packed, half)
    if len(places):
        if ranks.amax() >= layout.num_channels:
            raise DoesNotFitError(f"a block has more than {layout.num_channels} exponents that need escapes")
        escaped[blocks, ranks] = exponents.view(-1).take(places)


def _decode(stored: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Rows, int16 [32 n, channels], of blocks, uint8 [n, bytes]."""
    tops, rest, codes, escaped = stored.split(layout.extents, 1)
    packed, half = codes.contiguous(), layout.num_channels // 2
    pairs = packed.view(-1, GROUP, half)
    exponents = torch.empty((len(pairs), GROUP, layout.num_channels), dtype=torch.uint8, device=stored.device)
    torch.bitwise_and(pairs, 15, out=exponents[..., :half])
    torch.bitwise_right_shift(pairs, 4, out=exponents[..., half:])
    is_near = exponents.clamp(min=ZERO - 1).clamp_(max=ZERO).sub_(ZERO)  # all bits, or none
    torch.sub(tops.unsqueeze(2), exponents, out=exponents).bitwise_and_(is_near)
    places, blocks, ranks = _escapes(packed, half)
    if len(places):
        ranks.clamp_(max=layout.num_channels - 1)  # bytes that no encoder writes stay within their block
        exponents.view(-1)[places] = escaped[blocks, ranks]
    words = exponents.to(torch.int16).mul_(128)
    words |= rest.view(torch.int8).to(torch.int16).bitwise_and_(-0x7F81).view(words.shape)  # the sign and 7 bits
    return words.view(-1, layout.num_channels)


def _escapes(packed: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every code of 15 in blocks of codes, uint8 [n, bytes]: the place of its value among those of all blocks, its
    block, and how many of that are before it."""
    words = packed.view(-1).view(torch.int64)
    found = words >> 1
    found &= words
    found &= found >> 2
    found &= _LOWEST_BITS
    word = found.nonzero().squeeze(1)
    bits = found.take(word).unsqueeze(1) >> torch.arange(0, 64, 4, device=packed.device) & 1
    number, code = bits.nonzero().unbind(1)
    code = word.take(number) * 16 + code
    blocks, byte = code // (2 * packed.shape[1]), code >> 1
    ranks = torch.arange(len(code), device=packed.device) - torch.searchsorted(blocks, blocks)
    return byte + (byte // half + (code & 1)) * half, blocks, ranks


CODEC = LosslessCodec()
