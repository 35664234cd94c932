"""Centres of a model's queries before RoPE, per layer and query head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

import torch
from torch import Tensor

from sglang_evicpress.geometry.rope import Rope

MAX_OFFSET = 1 << 16
"""Farthest future query that counts, in tokens, where the model reads so far."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as far as a geometry depends on it. ``name``: its architecture; ``checkpoint``: digest of its files
    (``checkpoint.digest_of``), in hex."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    checkpoint: str


@dataclass(frozen=True, slots=True, eq=False)
class QueryGeometry:
    """Mean query of every head before RoPE, and the mean length of its bands.

    ``centres``: fp32 [layers, heads, head_dim], E[q]; ``lengths``: fp32 [layers, heads, bands], E|q_f| of each band of
    ``rope``. ``model`` and ``num_tokens`` say of which model and from how many queries; ``max_offset`` how far ahead a
    key may be asked for. Raises ValueError where shapes or the heads of a group do not agree; no value of a tensor is
    looked at, but by ``check_values``.
    """

    model: ModelFacts
    rope: Rope
    centres: Tensor
    lengths: Tensor
    num_tokens: int
    max_offset: int = MAX_OFFSET

    def __post_init__(self) -> None:
        facts, heads = self.model, (self.model.num_layers, self.model.num_heads)
        if facts.num_kv_heads < 1 or facts.num_heads % facts.num_kv_heads:
            raise ValueError(f"{facts.num_heads} query heads for {facts.num_kv_heads} KV heads: expected a multiple")
        if facts.head_dim != self.rope.head_dim:
            raise ValueError(f"RoPE of heads of {self.rope.head_dim}: expected heads of {facts.head_dim}")
        for name, values, size in (
            ("centres", self.centres, facts.head_dim),
            ("lengths", self.lengths, self.rope.num_bands),
        ):
            if values.dtype != torch.float32 or tuple(values.shape) != (*heads, size):
                raise ValueError(
                    f"{name} are {values.dtype} {tuple(values.shape)}: expected torch.float32 {(*heads, size)}"
                )
        if self.num_tokens < 1 or self.max_offset < 1:
            raise ValueError(f"{self.num_tokens} tokens and max_offset {self.max_offset}: expected at least 1 of each")

    def check_values(self) -> None:
        """Raise ValueError where a value is no finite number, or a length below 0. Waits for the device."""
        for name, values in (("centres", self.centres), ("lengths", self.lengths), ("inv_freq", self.rope.inv_freq)):
            if not bool(values.isfinite().all()):
                raise ValueError(f"{name} hold NaN or Inf: expected finite numbers")
        if bool((self.lengths < 0).any()):
            raise ValueError("lengths hold numbers below 0: expected lengths")

    @property
    def spread(self) -> Tensor:
        """fp32 [layers, heads, bands]: E|q_f| - |E[q_f]|, what a band's queries have besides their centre; 0 where all
        of them are alike."""
        return (self.lengths - self.rope.lengths(self.centres)).clamp_min(0.0)

    @property
    def offsets(self) -> Tensor:
        """int64 [n]: distances of future queries, in tokens: 1, 2, 4, ... up to ``max_offset``."""
        return 2 ** torch.arange(self.max_offset.bit_length(), device=self.centres.device)

    @property
    def digest(self) -> str:
        """Hex digest of all that scores depend on."""
        rope = self.rope
        hashed = sha256(repr((self.model, rope.is_interleaved, rope.factor, self.max_offset)).encode())
        for values in (rope.inv_freq, self.centres, self.lengths):
            hashed.update(values.cpu().numpy().tobytes())
        return hashed.hexdigest()

    def without_centres(self) -> Self:
        """The same as if queries gathered about no centre: only lengths are left."""
        return replace(self, centres=torch.zeros_like(self.centres))

    def of_layers(self, layers: Sequence[int]) -> Self:
        """The same of some layers alone, in ascending order."""
        if len(layers) == self.model.num_layers:
            return self
        facts, some = replace(self.model, num_layers=len(layers)), list(layers)
        centres, lengths = (torch.stack([values[layer] for layer in some]) for values in (self.centres, self.lengths))
        return replace(self, model=facts, centres=centres, lengths=lengths)

    def of_rank(self, rank: int, size: int) -> Self:
        """The heads that tensor-parallel rank ``rank`` of ``size`` holds; where there are more ranks than KV heads,
        neighbours share one. Raises ValueError where heads cannot be split so."""
        facts = self.model
        if facts.num_heads % size or max(size, facts.num_kv_heads) % min(size, facts.num_kv_heads):
            raise ValueError(
                f"{facts.num_heads} query heads and {facts.num_kv_heads} KV heads cannot be split over {size} ranks"
            )
        count = facts.num_heads // size
        held = slice(rank * count, (rank + 1) * count)
        own = replace(facts, num_heads=count, num_kv_heads=max(1, facts.num_kv_heads // size))
        return replace(self, model=own, centres=self.centres[:, held], lengths=self.lengths[:, held])

    def to(self, device: torch.device) -> Self:
        rope, centres, lengths = self.rope.to(device), self.centres.to(device), self.lengths.to(device)
        return replace(self, rope=rope, centres=centres, lengths=lengths)
