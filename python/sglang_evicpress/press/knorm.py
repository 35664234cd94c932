"""Key norm: tokens whose keys have the smallest norm survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_evicpress.kernels.score import key_norm
from sglang_evicpress.press.base import PressInput


@dataclass(frozen=True, slots=True)
class Knorm:
    """Score -||k||: keys of *low* norm get the most attention (Devoto et al., "A Simple and Effective L2
    Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430), as in kvpress's ``KnormPress``.
    """

    name: ClassVar[str] = "knorm"
    needs_queries: ClassVar[bool] = False

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n], never positive."""
        return -key_norm(node.k_buffers, node.slots)


PRESS = Knorm()
