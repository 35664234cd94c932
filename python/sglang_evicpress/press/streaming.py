"""StreamingLLM: the first tokens and the most recent ones survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_evicpress.press.base import PressInput


@dataclass(frozen=True, slots=True)
class Streaming:
    """Score = position; the first tokens are the sinks of ``select`` (StreamingLLM, arXiv 2309.17453)."""

    name: ClassVar[str] = "streaming"
    needs_queries: ClassVar[bool] = False

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n], exact for positions below 2**24."""
        return node.positions.to(torch.float32)


PRESS = Streaming()
