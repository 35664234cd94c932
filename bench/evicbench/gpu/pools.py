"""KV pools to run kernels on, and how many bytes each kernel must move over one (formulas: kernels/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from evicbench.gpu.models import LLAMA_8B, Model
from sglang_evicpress.codec.layout import layout_of


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool and a node in it: ``n`` tokens in ``num_slots`` slots."""

    n: int
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    num_slots: int

    @classmethod
    def of_model(cls, model: Model, n: int) -> Shape:
        shape = (model.config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        return cls(n, *shape, torch.bfloat16, n + n // 8 + 1)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the node."""
        return 2 * self.num_layers * self.num_heads * self.n * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.num_layers}x{self.num_heads}x{self.head_dim} {str(self.dtype)[6:]}, {self.n} tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """K and V, one ``[num_slots, H, D]`` a layer, and the node's ``slots``, int64 ``[n]``."""

    k: list[Tensor]
    v: list[Tensor]
    slots: Tensor


def random_pool(shape: Shape, generator: torch.Generator) -> Pool:
    """Random content on the generator's device, the node in shuffled slots, NaN in every slot that is not the node's.

    Norms vary by token, so that scores do.
    """
    device = generator.device
    slots = torch.randperm(shape.num_slots - 1, device=device, generator=generator)[: shape.n] + 1
    size = (shape.n, shape.num_heads, shape.head_dim)

    def layer() -> Tensor:
        buffer = torch.full((shape.num_slots, *size[1:]), float("nan"), dtype=shape.dtype, device=device)
        length = torch.rand(*size[:2], 1, device=device, generator=generator) * 2 + 0.25
        buffer[slots] = (torch.randn(size, device=device, generator=generator) * length).to(shape.dtype)
        return buffer

    return Pool([layer() for _ in range(shape.num_layers)], [layer() for _ in range(shape.num_layers)], slots)


def contiguous(pool: Pool) -> Pool:
    """The same pool with a node in consecutive slots; only for timing, as the slots that are new to it may be NaN."""
    return Pool(pool.k, pool.v, torch.arange(1, pool.slots.numel() + 1, device=pool.slots.device))


BYTES: dict[str, Callable[[Shape, int], int]] = {
    # name of the kernel: bytes it must move for m survivors (page size, window, moves, bits, query heads: see each)
    "key_norm": lambda s, _: _lh(s) * s.n * (_row(s) + 4),
    "value_key_ratio": lambda s, _: _lh(s) * s.n * (2 * _row(s) + 4),
    "key_difference": lambda s, _: _lh(s) * s.n * (2 * _row(s) + 4),
    "page_mean": lambda s, page: 4 * _lh(s) * (s.n + -(-s.n // page)),
    "redundancy": lambda s, window: _lh(s) * (_row(s) * (s.n + window) + 4 * s.n),
    "select_survivors": lambda s, m: _lh(s) * (20 * s.n + 4 * m),
    "compact": lambda s, m: 4 * _lh(s) * m * _row(s),
    "fill_holes": lambda s, moves: 4 * _row(s) * moves * _lh(s) + 8 * _lh(s) * moves,
    "gather": lambda s, m: 4 * _lh(s) * m * _row(s),
    "scatter": lambda s, m: 4 * _lh(s) * m * _row(s),
    "encode": lambda s, bits: s.kv_bytes + _encoded(s, bits),
    "decode": lambda s, bits: s.kv_bytes + _encoded(s, bits),
    # keys and their positions twice, one weight a query head and token
    "window_attention": lambda s, q: _lh(s) * s.n * (2 * _row(s) + 8) + 4 * s.num_layers * q * s.n,
}


def _lh(shape: Shape) -> int:
    return shape.num_layers * shape.num_heads


def _encoded(shape: Shape, bits: int) -> int:
    return (
        shape.num_layers
        * layout_of(f"int{bits}", shape.n, shape.num_heads * shape.head_dim, shape.dtype.itemsize).num_bytes
    )


def _row(shape: Shape) -> int:
    return shape.head_dim * shape.dtype.itemsize


LLAMA_32K = Shape.of_model(LLAMA_8B, 32768)
