"""KeyDiff: tokens whose keys point away from the others survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_evicpress.kernels.score import key_difference
from sglang_evicpress.press.base import PressInput


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """Score -cos(k, mean of the normalised keys) (KeyDiff, arXiv 2504.15364; kvpress's ``KeyDiffPress``).

    The mean is over the keys the node holds, per (layer, head); path keys above the node do not enter.
    """

    name: ClassVar[str] = "keydiff"
    needs_queries: ClassVar[bool] = False

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n] in [-1, 1]."""
        return key_difference(node.k_buffers, node.slots)


PRESS = KeyDiff()
