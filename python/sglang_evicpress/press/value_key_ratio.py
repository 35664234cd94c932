"""Value over key norm, per token or averaged per page (PagedEviction)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sglang_evicpress.kernels.score import page_mean, value_key_ratio
from sglang_evicpress.press.base import PressInput


@dataclass(frozen=True, slots=True)
class ValueKeyRatio:
    """Score ||v|| / ||k|| (PagedEviction, section 4.1, algorithm 1: ``S_i <- ||V_i||_2 / ||K_i||_2``).

    ``per="page"`` gives every slot the mean over its page ("Compute block score S_j as the average"), a
    page being ``page_size`` consecutive slots of the node, the last one perhaps short. Pages are chosen per
    (layer, head). A budget of whole pages keeps whole pages; sinks put before them cut the last one.
    """

    per: Literal["token", "page"] = "token"
    name: ClassVar[str] = "value_key_ratio"
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.per not in ("token", "page"):
            raise ValueError(f"the unit of value_key_ratio is {self.per!r}: expected 'token' or 'page'")

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n], never negative."""
        ratio = value_key_ratio(node.k_buffers, node.v_buffers, node.slots)
        if self.per == "token":
            return ratio
        means = page_mean(ratio, node.page_size)
        return means.repeat_interleave(node.page_size, dim=-1)[..., : ratio.shape[-1]]


PRESS = ValueKeyRatio()
