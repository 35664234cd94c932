"""Geometry: tokens survive whose keys the model's queries, as they usually are, will ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.geometry.score import geometry_scores
from sglang_evicpress.press.base import PressInput

MISSING = "expected a server with --kv-geometry FILE, which evicpress calibrate geometry writes"


@dataclass(frozen=True, slots=True)
class GeometryPress:
    """Score of a key by the centres of the model's queries before RoPE, which ``evicpress calibrate geometry`` measures
    once (after TriAttention, arXiv 2604.04921; the formula is with ``geometry_scores``).

    Queries are expected from the end of the node on. No query of the prompt is needed.
    """

    geometry: QueryGeometry | None = None
    name: ClassVar[str] = "geometry"
    needs_queries: ClassVar[bool] = False

    def score(self, node: PressInput) -> Tensor:
        """fp32 [L, H, n], in standard deviations of a query head. Raises ValueError without a geometry, or with that of
        another model."""
        if self.geometry is None:
            raise ValueError(f"the geometry of queries is missing, by which geometry scores: {MISSING}")
        last = torch.full((1,), node.start + node.num_tokens - 1, device=node.slots.device)
        return geometry_scores(self.geometry, node.k_buffers, node.slots.unsqueeze(0), last).squeeze(2)


PRESS = GeometryPress()
