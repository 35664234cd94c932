"""Every kernel against its torch reference: one pool, one kernel, and how far off the kernel is.

References run on the CPU, in float32 from the same bits. A kernel that must move bits is compared bit for bit, slots
that it must not touch included.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from evicbench.gpu.pools import Pool, Shape
from sglang_evicpress.kernels.compact import compact, compact_torch
from sglang_evicpress.kernels.fill_holes import fill_holes, fill_holes_torch
from sglang_evicpress.kernels.redundancy import redundancy, redundancy_torch
from sglang_evicpress.kernels.score import (
    key_difference,
    key_difference_torch,
    key_norm,
    key_norm_torch,
    page_mean,
    page_mean_torch,
    value_key_ratio,
    value_key_ratio_torch,
)
from sglang_evicpress.kernels.select import select_survivors, select_survivors_torch
from sglang_evicpress.kernels.window_attention import window_attention, window_attention_torch

SUMS = 1e-5  # relative error allowed to sums in float32
DOTS = 1e-4  # and to what matrix units and exponentials add
INTEGERS = {2: torch.int16, 4: torch.int32}
GROUP = 4  # query heads per kv head


@dataclass(frozen=True, slots=True)
class Check:
    """``run(pool, shape, generator)``, the pool on the device and the generator on the CPU, yields errors: relative
    ones, or 0 and infinity where every bit counts."""

    name: str
    tolerance: float
    run: Callable[[Pool, Shape, torch.Generator], Iterator[float]]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| by 2-norm, and infinity where one holds a NaN or infinity that the other does
    not; so an output that was not written never passes."""
    here, there = actual.cpu().double(), expected.cpu().double()
    if here.shape != there.shape or not torch.equal(here.isfinite(), there.isfinite()):
        return float("inf")
    if not here.isfinite().all():
        odd = ~here.isfinite()
        if not torch.equal(here[odd].nan_to_num(0.0), there[odd].nan_to_num(0.0)):
            return float("inf")
        here, there = here[~odd], there[~odd]
    if not here.numel():
        return 0.0
    size = float(there.norm())
    off = float((here - there).norm())
    return off / size if size else (0.0 if off == 0.0 else float("inf"))


def bits(layer: Tensor) -> Tensor:
    return layer.cpu().view(INTEGERS[layer.dtype.itemsize])


def same_bits(actual: Pool, expected: Pool) -> float:
    pairs = zip([*actual.k, *actual.v], [*expected.k, *expected.v], strict=True)
    return 0.0 if all(torch.equal(bits(one), bits(other)) for one, other in pairs) else float("inf")


def random_survivors(shape: Shape, num_kept: int, generator: torch.Generator) -> Tensor:
    """Other survivors in every layer and head, ascending: int32 ``[L, H, num_kept]`` on the CPU."""
    order = torch.rand(shape.num_layers, shape.num_heads, shape.n, generator=generator).argsort(-1)
    return order[..., :num_kept].sort(-1).values.int()


def dense_survivors(shape: Shape, generator: torch.Generator) -> Tensor:
    """All but one: nearly every row moves onto its neighbour's place, which is where a missing barrier shows."""
    dropped = torch.randint(0, shape.n, (shape.num_layers, shape.num_heads, 1), generator=generator)
    kept = torch.arange(shape.n - 1).expand(shape.num_layers, shape.num_heads, -1)
    return (kept + (kept >= dropped)).int()


def random_bits(pool: Pool, generator: torch.Generator) -> Pool:
    """Every bit pattern, NaN payloads and subnormals included."""
    device = pool.slots.device
    made = pool.to("cpu")
    for layer in (*made.k, *made.v):
        size = 8 * layer.dtype.itemsize
        layer.view(INTEGERS[layer.dtype.itemsize]).random_(-(2 ** (size - 1)), 2 ** (size - 1), generator=generator)
    return made.to(str(device))


def _key_norm(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    host = pool.to("cpu")
    yield relative_error(key_norm(pool.k, pool.slots, backend="triton"), key_norm_torch(host.k, host.slots))


def _value_key_ratio(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    host = pool.to("cpu")
    actual = value_key_ratio(pool.k, pool.v, pool.slots, backend="triton")
    yield relative_error(actual, value_key_ratio_torch(host.k, host.v, host.slots))


def _key_difference(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    host = pool.to("cpu")
    actual = key_difference(pool.k, pool.slots, backend="triton")
    yield relative_error(actual, key_difference_torch(host.k, host.slots))


def _page_mean(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    scores = torch.randn(shape.num_layers, shape.num_heads, shape.n, generator=generator)
    for page_size in (1, 3, 16, 64):
        actual = page_mean(scores.to(pool.slots.device), page_size, backend="triton")
        yield relative_error(actual, page_mean_torch(scores, page_size))


def _redundancy(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    host = pool.to("cpu")
    for window in {1, min(37, shape.n)}:
        recent = random_survivors(shape, window, generator)
        actual = redundancy(pool.k, pool.slots, recent.to(pool.slots.device), backend="triton")
        yield relative_error(actual, redundancy_torch(host.k, host.slots, recent))


def _window_attention(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    host, device = pool.to("cpu"), pool.slots.device
    positions = torch.arange(shape.n, dtype=torch.int32).expand(shape.num_layers, shape.num_heads, -1).contiguous()
    for window in (5, 32):
        queries = torch.randn(
            shape.num_layers, window, GROUP * shape.num_heads, shape.head_dim, generator=generator
        ).to(shape.dtype)
        first = max(0, shape.n - window)
        asked = torch.arange(first, first + window)
        scale = shape.head_dim**-0.5
        actual = window_attention(
            queries.to(device), pool.k, pool.slots, asked.to(device), positions.to(device), scale, backend="triton"
        )
        yield relative_error(actual, window_attention_torch(queries, host.k, host.slots, asked, positions, scale))


def _select(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    scores = torch.randn(shape.num_layers, shape.num_heads, shape.n, generator=generator)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38])
    special = odd[torch.randint(0, len(odd), scores.shape, generator=generator)]
    for given in (scores, scores.round(), special):
        for num_kept in {1, shape.n // 5, shape.n // 2, shape.n - 1, shape.n}:
            actual = select_survivors(given.to(pool.slots.device), num_kept, backend="triton")
            yield 0.0 if torch.equal(actual.cpu(), select_survivors_torch(given, num_kept)) else float("inf")


def _compact(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    keeps = [random_survivors(shape, num_kept, generator) for num_kept in {shape.n // 4, shape.n * 3 // 4, shape.n}]
    if shape.n > 1:
        keeps += [dense_survivors(shape, generator) for _ in range(4)]
    for survivors in keeps:
        here = random_bits(pool, generator)
        expected = here.to("cpu")
        compact_torch(expected.k, expected.v, expected.slots, survivors)
        compact(here.k, here.v, here.slots, survivors.to(here.slots.device), backend="triton")
        yield same_bits(here, expected)


def _fill_holes(pool: Pool, shape: Shape, generator: torch.Generator) -> Iterator[float]:
    width = shape.n // 3
    rows = (shape.num_layers, shape.num_heads)
    targets = torch.rand(*rows, shape.n - width, generator=generator).argsort(-1)[..., :width].sort(-1).values.int()
    sources = (shape.n - width + torch.rand(*rows, width, generator=generator).argsort(-1)).int()
    count = torch.randint(0, width + 1, (*rows, 1), generator=generator)
    absent = torch.arange(width) >= count  # every head as many moves as it likes
    for moves in ((targets, sources), (targets.masked_fill(absent, -1), sources.masked_fill(absent, -1))):
        here = random_bits(pool, generator)
        expected = here.to("cpu")
        fill_holes_torch(expected.k, expected.v, expected.slots, *moves)
        fill_holes(here.k, here.v, here.slots, *(move.to(here.slots.device) for move in moves), backend="triton")
        yield same_bits(here, expected)


def stage_module() -> ModuleType | None:
    """``kernels/stage.py``, None where this version of the package has none."""
    try:
        return importlib.import_module("sglang_evicpress.kernels.stage")
    except ModuleNotFoundError:
        return None


CHECKS = (
    Check("key_norm", SUMS, _key_norm),
    Check("value_key_ratio", SUMS, _value_key_ratio),
    Check("key_difference", SUMS, _key_difference),
    Check("page_mean", SUMS, _page_mean),
    Check("redundancy", SUMS, _redundancy),
    Check("window_attention", DOTS, _window_attention),
    Check("select_survivors", 0.0, _select),
    Check("compact", 0.0, _compact),
    Check("fill_holes", 0.0, _fill_holes),
)
