"""Group quantisers beside the codecs': the plain formula in float64, and torchao's, which SGLang brings."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_tinygemm,
    _quantize_affine_tinygemm,
)

from sglang_evicpress.codec.groups import GroupCodec


class Errors(NamedTuple):
    """Relative L2 errors of keys and values together: of the codec, of the formula in float64, of torchao, each result
    rounded to bfloat16; and the codec's largest error over its bound."""

    codec: float
    float64: float
    torchao: float
    over_bound: float


def errors(keys: Tensor, values: Tensor, bits: int, group: int) -> Errors:
    """Of one layer's rows, bfloat16 [slots, channels]; slots behind the last whole group are left out."""
    num_slots, num_channels = keys.shape
    num_slots -= num_slots % group
    keys, values = keys[:num_slots], values[:num_slots]
    codec = GroupCodec(bits, group=group)
    stored = torch.empty(codec.num_bytes(num_slots, num_channels, keys.dtype), dtype=torch.uint8)
    codec.encode(keys, values, stored)
    out = torch.empty_like(keys), torch.empty_like(values)
    codec.decode(stored, num_slots, 0, *out)
    found, total, worst = [0.0, 0.0, 0.0], 0.0, 0.0
    for rows, decoded, block in zip((keys, values), out, _blocks(num_channels, group), strict=True):
        grouped = _grouped(rows.double(), block)
        least, greatest = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
        step = (greatest - least) / ((1 << bits) - 1)
        bound = _bound(least, greatest, step)
        lost = (_grouped(decoded.double(), block) - grouped).abs()
        worst = max(worst, float((lost / bound).max()))
        plain = torch.where(step > 0, least + ((grouped - least) / step).round().mul(step).nan_to_num(), grouped)
        theirs = _grouped(_torchao(rows.float(), bits, block).bfloat16().double(), block)
        total += float(grouped.square().sum())
        for at, back in enumerate((_grouped(decoded.double(), block), plain.bfloat16().double(), theirs)):
            found[at] += float((back - grouped).square().sum())
    return Errors(*((square / total) ** 0.5 for square in found), worst)


def _blocks(num_channels: int, group: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Slots and channels of a group of keys, and of values."""
    return (group, 1), (1, gcd(group, num_channels))


def _grouped(rows: Tensor, block: tuple[int, int]) -> Tensor:
    """[groups, values of a group]."""
    slots, channels = rows.shape
    split = rows.view(slots // block[0], block[0], channels // block[1], block[1])
    return split.transpose(1, 2).reshape(-1, block[0] * block[1])


def _bound(least: Tensor, greatest: Tensor, step: Tensor) -> Tensor:
    """Half a step, and the rounding to bfloat16 of values up to the group's greatest; a code that lies between two may
    be either, as float32 has it."""
    rounding = torch.finfo(torch.bfloat16).eps / 2 * torch.maximum(-least, greatest)
    return 0.5 * step * (1 + 1e-4) + rounding + torch.finfo(torch.bfloat16).tiny


def _torchao(rows: Tensor, bits: int, block: tuple[int, int]) -> Tensor:
    """Rows after torchao's asymmetric quantiser with scale and zero point in bfloat16; zero need not be a code."""
    levels = (1 << bits) - 1
    scale, zero = _choose_qparams_affine_tinygemm(
        rows, MappingType.ASYMMETRIC, block, torch.uint8, 0, levels, None, torch.bfloat16, torch.bfloat16
    )
    scale, zero = scale.float(), zero.float()
    codes = _quantize_affine_tinygemm(rows, block, scale, zero, torch.uint8, 0, levels)
    back: Tensor = _dequantize_affine_tinygemm(codes, block, scale, zero, torch.uint8, 0, levels)
    return back
