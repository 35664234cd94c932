"""SnapKV: tokens that the last queries of the prefill look at survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from sglang_evicpress.kernels.window_attention import MAX_WINDOW, window_attention
from sglang_evicpress.press.base import PressInput


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Attention of the last ``window`` queries, pooled over ``kernel_size`` neighbouring tokens (SnapKV,
    arXiv 2404.14469; window 32, kernel 7 and max pooling are EvolKV's, section 4.1).

    In this order: softmax over the node's own slots, mean over the queries, pooling along the slots (in a
    compressed node the neighbours are the survivors), mean over the query heads of a kv head. Tokens of the
    window itself are not pooled in; they survive first, the latest before the others when not all fit. On a
    whole prompt ``kernel_size`` 5 with ``pooling`` "avg" equals kvpress's ``SnapKVPress`` of the same window.
    """

    window: int = 32
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"
    name: ClassVar[str] = "snapkv"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"the snapkv window is {self.window}: expected 1 to {MAX_WINDOW} queries")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"the snapkv kernel size is {self.kernel_size}: expected an odd number")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"the snapkv pooling is {self.pooling!r}: expected 'max' or 'avg'")

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n]; a slot of the window scores more than 1, the others at most 1.

        A window of fewer than ``window`` queries (a short prefill) is used as it is. Raises ValueError when
        the node comes without queries, or with query heads that do not divide into its kv heads.
        """
        if node.window is None:
            raise ValueError("the queries of the node are missing: expected the last window, by which snapkv scores")
        queries = node.window.queries[:, -self.window :]
        query_positions = node.window.positions[-self.window :]
        num_layers, num_heads, num_slots = node.positions.shape
        attention = window_attention(
            queries, node.k_buffers, node.slots, query_positions, node.positions, node.scale
        ).view(num_layers, num_heads, -1, num_slots)

        in_window = node.positions >= query_positions[0]
        pooled = self._pool(attention.masked_fill(in_window.unsqueeze(2), 0.0)).mean(dim=2)
        lead = (node.positions - query_positions[0]).to(torch.float32)
        return torch.where(in_window, 2.0 + lead, pooled)

    def _pool(self, attention: Tensor) -> Tensor:
        """Along the last axis, same length; beyond the ends counts as no attention, as in kvpress."""
        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        rows = attention.flatten(0, 2)
        return pool(rows, self.kernel_size, stride=1, padding=self.kernel_size // 2).view_as(attention)


PRESS = SnapKV()
