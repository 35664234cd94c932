"""Value over key norm, per token (PagedEviction)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_evicpress.kernels.score import value_key_ratio
from sglang_evicpress.press.base import PressInput


@dataclass(frozen=True, slots=True)
class ValueKeyRatio:
    """Score ||v|| / ||k|| (PagedEviction, section 4.1, algorithm 1: ``S_i <- ||V_i||_2 / ||K_i||_2``)."""

    name: ClassVar[str] = "value_key_ratio"
    needs_queries: ClassVar[bool] = False

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n], never negative."""
        return value_key_ratio(node.k_buffers, node.v_buffers, node.slots)


PRESS = ValueKeyRatio()
