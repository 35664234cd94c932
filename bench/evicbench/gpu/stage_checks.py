"""Gather to staging and scatter from it against their references, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from evicbench.gpu.checks import Check, random_bits, same_bits, stage_module
from evicbench.gpu.pools import Pool, Shape


def staging(pool: Pool, shape: Shape, rows: int, device: str | torch.device) -> Tensor:
    """A buffer ``[L, 2, rows, H, D]`` of NaN."""
    size = (shape.num_layers, 2, rows, shape.num_heads, shape.head_dim)
    return torch.full(size, float("nan"), dtype=shape.dtype, device=device)


def _gather(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    stage = stage_module()
    here = random_bits(pool, generator)
    host = here.to("cpu")
    out, expected = staging(here, shape, shape.n, here.slots.device), staging(here, shape, shape.n, "cpu")
    stage.gather(here.k, here.v, here.slots, out, backend="triton")
    stage.gather_torch(host.k, host.v, host.slots, expected)
    yield same_bits(Pool([out], [], here.slots), Pool([expected], [], here.slots))


def _scatter(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    stage = stage_module()
    for begin in {0, 3}:
        here = random_bits(pool, generator)
        expected = here.to("cpu")
        staged = staging(here, shape, shape.n + 3, "cpu")
        staged.normal_(generator=generator)
        stage.scatter_torch(expected.k, expected.v, expected.slots, staged, begin=begin)
        stage.scatter(here.k, here.v, here.slots, staged.to(here.slots.device), begin=begin, backend="triton")
        yield same_bits(here, expected)


STAGE_CHECKS = (Check("gather", 0.0, _gather), Check("scatter", 0.0, _scatter))
