"""Geometries of queries drawn at random."""

from __future__ import annotations

import torch

from sglang_evicpress.geometry.centres import ModelFacts, QueryGeometry
from sglang_evicpress.geometry.rope import Rope


def make_rope(
    head_dim: int = 16, num_turning: int | None = None, *, is_interleaved: bool = False, factor: float = 1.0
) -> Rope:
    num = head_dim // 2 if num_turning is None else num_turning
    return Rope(100.0 ** -(torch.arange(num) / num).float(), head_dim, is_interleaved, factor)


def make_geometry(
    num_layers: int = 3, num_heads: int = 4, num_kv_heads: int = 2, rope: Rope | None = None, *, max_offset: int = 64
) -> QueryGeometry:
    """Centres of about 1 and bands somewhat longer than them."""
    rope = rope or make_rope()
    draw = torch.Generator().manual_seed(7)
    centres = torch.randn(num_layers, num_heads, rope.head_dim, generator=draw)
    more = torch.rand(num_layers, num_heads, rope.num_bands, generator=draw)
    facts = ModelFacts("MadeForTests", num_layers, num_heads, num_kv_heads, rope.head_dim, "0" * 32)
    return QueryGeometry(facts, rope, centres, rope.lengths(centres) + more, 1000, max_offset)
