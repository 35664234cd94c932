"""A control that knows nothing: which tokens survive is drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_evicpress.device import to_device
from sglang_evicpress.press.base import PressInput

_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_SCORE_BITS = 24  # what an fp32 in [0, 1) holds exactly


@dataclass(frozen=True, slots=True)
class Random:
    """A uniform score that is a pure function of (seed, layer, head, absolute position).

    So every process, device and split of a node draws alike, whatever slots the node lies in. ``layers``: those of the
    node that is scored, None where it has all of them.
    """

    seed: int = 0
    layers: tuple[int, ...] | None = None
    name: ClassVar[str] = "random"
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"the seed of the random press is {self.seed}: expected 0 to 2**63 - 1")

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n] in [0, 1), multiples of 2**-24."""
        positions = node.positions.to(torch.int64)
        num_layers, num_heads, _ = positions.shape
        numbers = range(num_layers) if self.layers is None else self.layers
        layers = to_device(torch.tensor(numbers, dtype=torch.int64), positions.device).view(-1, 1, 1)
        heads = torch.arange(num_heads, dtype=torch.int64, device=positions.device).view(1, -1, 1)
        mixed = _mix(_mix(_mix(layers + self.seed) + heads) + positions)
        return _shift_right(mixed, 64 - _SCORE_BITS).to(torch.float32) / (1 << _SCORE_BITS)


PRESS = Random()


def _mix(x: Tensor) -> Tensor:
    """One step of SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014)."""
    x = x + _GOLDEN_RATIO
    for shift, factor in _ROUNDS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 shifts carry the sign down, which the mask takes off again."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
