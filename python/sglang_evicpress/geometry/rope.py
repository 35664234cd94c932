"""Rotary position embedding as bands that turn with the position, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """RoPE of heads of ``head_dim`` (RoFormer, arXiv 2104.09864, section 3.4.2).

    The first ``2 * F`` dimensions of a head are F bands, each a complex number that position p turns by
    ``p * inv_freq[f]`` radians (``inv_freq``: fp32 [F]) and lengthens by ``factor`` (YaRN, arXiv 2309.00071, section
    3.4; 1 elsewhere). Band f has dimensions f and ``f + F``, or 2f and ``2f + 1`` where ``is_interleaved``. The other
    ``head_dim - 2 * F`` dimensions (partial RoPE) stay as they are, and count as bands of one dimension.

    Raises ValueError for frequencies that are no fp32 [F], more bands than a head has room for, or a factor that is
    not above 0. No value of a tensor is looked at.
    """

    inv_freq: Tensor
    head_dim: int
    is_interleaved: bool = False
    factor: float = 1.0

    def __post_init__(self) -> None:
        freq = self.inv_freq
        if freq.dim() != 1 or freq.dtype != torch.float32:
            raise ValueError(f"inv_freq is {freq.dtype} {tuple(freq.shape)}: expected torch.float32 [bands]")
        if not 0 < 2 * len(freq) <= self.head_dim:
            raise ValueError(f"{len(freq)} bands in heads of {self.head_dim}: expected 1 to {self.head_dim // 2}")
        if not 0.0 < self.factor < float("inf"):
            raise ValueError(f"the factor of RoPE is {self.factor}: expected a finite number above 0")

    @property
    def num_turning(self) -> int:
        """Number of bands that turn, F."""
        return len(self.inv_freq)

    @property
    def num_bands(self) -> int:
        """Number of all bands: those that turn, and the dimensions without RoPE."""
        return self.head_dim - self.num_turning

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Bands that turn, complex [..., F], and the other dimensions, [..., head_dim - 2 * F], of [..., head_dim]."""
        num = self.num_turning
        turning, still = heads[..., : 2 * num], heads[..., 2 * num :]
        if self.is_interleaved:
            return torch.complex(turning[..., ::2].contiguous(), turning[..., 1::2].contiguous()), still
        return torch.complex(turning[..., :num].contiguous(), turning[..., num:].contiguous()), still

    def join(self, turning: Tensor, still: Tensor) -> Tensor:
        """Inverse of ``split``: [..., head_dim]."""
        if self.is_interleaved:
            return torch.cat([torch.stack([turning.real, turning.imag], -1).flatten(-2), still], -1)
        return torch.cat([turning.real, turning.imag, still], -1)

    def lengths(self, heads: Tensor) -> Tensor:
        """Absolute value of every band, [..., num_bands] of [..., head_dim]; RoPE changes it by the factor alone."""
        turning, still = self.split(heads)
        return torch.cat([turning.abs(), still.abs()], -1)

    def turns(self, positions: Tensor) -> Tensor:
        """Complex128 [..., F] of absolute value 1: the turn of each band at ``positions`` [...]."""
        angles = positions.to(torch.float64)[..., None] * self.inv_freq.to(positions.device, torch.float64)
        return torch.polar(torch.ones_like(angles), angles)

    def apply(self, heads: Tensor, positions: Tensor) -> Tensor:
        """``heads`` [..., head_dim] as they are cached for ``positions``, which broadcast to [...]."""
        turning, still = self.split(heads)
        return self.join(turning * (self.turns(positions) * self.factor).to(turning.dtype), still)

    def undo(self, heads: Tensor, positions: Tensor) -> Tensor:
        """``heads`` [..., head_dim] as they were before RoPE at ``positions``: the inverse of ``apply``."""
        turning, still = self.split(heads)
        return self.join(turning * (self.turns(positions).conj() / self.factor).to(turning.dtype), still)

    def to(self, device: torch.device) -> Rope:
        return Rope(self.inv_freq.to(device), self.head_dim, self.is_interleaved, self.factor)
