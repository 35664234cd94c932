"""Every kernel against its torch reference: one pool, one kernel, and how far off the kernel is.

References run on the CPU, in float32 from the same bits. A kernel that must move bits is compared bit for bit, slots
that it must not touch included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from evicbench.gpu.pools import Pool, Shape
from sglang_evicpress.codec.layout import BITS, HEADER, GroupLayout, LosslessLayout, layout_of
from sglang_evicpress.kernels import group_codec, lossless_codec
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
from sglang_evicpress.kernels.stage import gather, gather_torch, scatter, scatter_torch
from sglang_evicpress.kernels.window_attention import window_attention, window_attention_torch

SUMS = 1e-5  # relative error allowed to sums in float32
DOTS = 1e-4  # and to what matrix units and exponentials add
INTEGERS = {2: torch.int16, 4: torch.int32}
GROUP = 4  # query heads per kv head


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
    """The same memory as integers."""
    return layer.view(INTEGERS[layer.dtype.itemsize])


def same_bits(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return 0.0 if all(torch.equal(bits(one.cpu()), bits(other)) for one, other in pairs) else float("inf")


def random_survivors(shape: Shape, num_kept: int, generator: torch.Generator) -> Tensor:
    """Other survivors in every layer and head, ascending: int32 ``[L, H, num_kept]`` on the CPU."""
    order = torch.rand(shape.num_layers, shape.num_heads, shape.n, generator=generator).argsort(-1)
    return order[..., :num_kept].sort(-1).values.int()


def dense_survivors(shape: Shape, generator: torch.Generator) -> Tensor:
    """All but one: nearly every row moves onto its neighbour's place, which is where a missing barrier shows."""
    dropped = torch.randint(0, shape.n, (shape.num_layers, shape.num_heads, 1), generator=generator)
    kept = torch.arange(shape.n - 1).expand(shape.num_layers, shape.num_heads, -1)
    return (kept + (kept >= dropped)).int()


def staging(shape: Shape, rows: int, device: str = "cpu") -> Tensor:
    """A buffer ``[L, 2, rows, H, D]`` of NaN."""
    size = (shape.num_layers, 2, rows, shape.num_heads, shape.head_dim)
    return torch.full(size, float("nan"), dtype=shape.dtype, device=device)


def copied(given: Any, device: str) -> Any:
    """Tensors on the device, lists of them too, never the ones given; all else as it is."""
    if isinstance(given, tuple | list):
        return [copied(each, device) for each in given]
    return given.to(device, copy=True) if isinstance(given, Tensor) else given


@dataclass(frozen=True, slots=True)
class Trial:
    """A pool on the CPU, its kernels on a device. Errors are relative, or 0 and infinity where every bit counts."""

    pool: Pool
    shape: Shape
    generator: torch.Generator
    device: str

    def scored(self, kernel: Callable[..., Tensor], reference: Callable[..., Tensor], *given: Any) -> float:
        """Error of the result."""
        return relative_error(kernel(*copied(given, self.device), backend="triton"), reference(*given))

    def moved(self, kernel: Callable[..., None], reference: Callable[..., None], *given: Any) -> float:
        """Error of K and V afterwards, which hold random bits before."""
        self.fill_with_bits()
        every = (self.pool.k, self.pool.v, self.pool.slots, *given)
        here, there = copied(every, self.device), copied(every, "cpu")
        reference(*there)
        kernel(*here, backend="triton")
        return same_bits([*here[0], *here[1]], [*there[0], *there[1]])

    def fill_with_bits(self) -> None:
        """Every bit pattern into the pool, NaN payloads and subnormals included."""
        for layer in (*self.pool.k, *self.pool.v):
            most = 2 ** (8 * layer.dtype.itemsize - 1)
            bits(layer).random_(-most, most, generator=self.generator)

    def randn(self, *size: int) -> Tensor:
        return torch.randn(self.shape.num_layers, *size, generator=self.generator)

    def survivors(self, num_kept: int) -> Tensor:
        return random_survivors(self.shape, num_kept, self.generator)


def _page_mean(it: Trial) -> Iterator[float]:
    scores = it.randn(it.shape.num_heads, it.shape.n)
    yield from (it.scored(page_mean, page_mean_torch, scores, page_size) for page_size in (1, 3, 16, 64))


def _redundancy(it: Trial) -> Iterator[float]:
    for window in {1, min(37, it.shape.n)}:
        yield it.scored(redundancy, redundancy_torch, it.pool.k, it.pool.slots, it.survivors(window))


def _window_attention(it: Trial) -> Iterator[float]:
    shape = it.shape
    positions = torch.arange(shape.n, dtype=torch.int32).expand(shape.num_layers, shape.num_heads, -1).contiguous()
    for window in (5, 32):
        queries = it.randn(window, GROUP * shape.num_heads, shape.head_dim).to(shape.dtype)
        asked = torch.arange(window) + max(0, shape.n - window)
        given = queries, it.pool.k, it.pool.slots, asked, positions, shape.head_dim**-0.5
        yield it.scored(window_attention, window_attention_torch, *given)


def _select(it: Trial) -> Iterator[float]:
    n, scores = it.shape.n, it.randn(it.shape.num_heads, it.shape.n)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38])
    special = odd[torch.randint(0, len(odd), scores.shape, generator=it.generator)]
    for given in (scores, scores.round(), special):
        for num_kept in {1, n // 5, n // 2, n - 1, n}:
            actual = select_survivors(given.to(it.device), num_kept, backend="triton")
            yield 0.0 if torch.equal(actual.cpu(), select_survivors_torch(given, num_kept)) else float("inf")


def _compact(it: Trial) -> Iterator[float]:
    keeps = [it.survivors(num_kept) for num_kept in {it.shape.n // 4, it.shape.n * 3 // 4, it.shape.n}]
    if it.shape.n > 1:
        keeps += [dense_survivors(it.shape, it.generator) for _ in range(4)]
    yield from (it.moved(compact, compact_torch, survivors) for survivors in keeps)


def _fill_holes(it: Trial) -> Iterator[float]:
    width, generator = it.shape.n // 3, it.generator
    rows, left = (it.shape.num_layers, it.shape.num_heads), it.shape.n - width
    targets = torch.rand(*rows, left, generator=generator).argsort(-1)[..., :width].sort(-1).values.int()
    sources = (left + torch.rand(*rows, width, generator=generator).argsort(-1)).int()
    absent = torch.arange(width) >= torch.randint(0, width + 1, (*rows, 1), generator=generator)
    for moves in ((targets, sources), (targets.masked_fill(absent, -1), sources.masked_fill(absent, -1))):
        yield it.moved(fill_holes, fill_holes_torch, *moves)  # every head as many moves as it likes


def _gather(it: Trial) -> Iterator[float]:
    it.fill_with_bits()
    out, expected = staging(it.shape, it.shape.n, it.device), staging(it.shape, it.shape.n)
    gather(*copied((it.pool.k, it.pool.v, it.pool.slots), it.device), out, backend="triton")
    gather_torch(it.pool.k, it.pool.v, it.pool.slots, expected)
    yield same_bits([out], [expected])


def _scatter(it: Trial) -> Iterator[float]:
    yield it.moved(scatter, scatter_torch, staging(it.shape, it.shape.n).normal_(generator=it.generator))


def _codecs(shape: Shape) -> Iterator[tuple[ModuleType, GroupLayout | LosslessLayout]]:
    num_channels = shape.num_heads * shape.head_dim
    for codec in BITS:
        yield group_codec, layout_of(codec, shape.n, num_channels, shape.dtype.itemsize)
    if shape.dtype == torch.bfloat16:
        yield lossless_codec, LosslessLayout(shape.n, num_channels)


def _encode(it: Trial) -> Iterator[float]:
    shape, rows = it.shape, (it.pool.k, it.pool.v, it.pool.slots)
    for kernels, layout in _codecs(shape):
        expected = torch.empty((shape.num_layers, layout.num_bytes), dtype=torch.uint8)
        out, flags = torch.empty_like(expected, device=it.device), torch.zeros(2, dtype=torch.int32)
        here = flags[:1].to(it.device, copy=True)
        kernels.encode(*copied(rows, it.device), layout, out, here, backend="triton")
        kernels.encode_torch(*rows, layout, expected, flags[1:])
        is_same = torch.equal(out.cpu()[:, HEADER.size :], expected[:, HEADER.size :])
        yield 0.0 if is_same and not here.any() and not flags.any() else float("inf")
        k, v, slots = copied(rows, it.device)
        for layer, slot, bad in product((k[0], v[-1]), {0, shape.n - 1}, (float("nan"), float("inf"), -float("inf"))):
            row = layer[slots[slot], 0]
            kept = row.clone()
            row[:] = bad  # a group of nothing else, or a part of one
            kernels.encode(k, v, slots, layout, out, here.zero_(), backend="triton")
            row[1:] = kept[1:]
            of_group = here.clone()
            kernels.encode(k, v, slots, layout, out, here.zero_(), backend="triton")
            row[:] = kept
            yield 0.0 if of_group.any() and here.any() else float("inf")


def _decode(it: Trial) -> Iterator[float]:
    shape = it.shape
    for kernels, layout in _codecs(shape):
        stored = torch.empty((shape.num_layers, layout.num_bytes), dtype=torch.uint8)
        flag = torch.zeros(1, dtype=torch.int32)
        kernels.encode_torch(it.pool.k, it.pool.v, it.pool.slots, layout, stored, flag)
        for begin, end in {(0, shape.n), (shape.n // 3, shape.n - shape.n // 5)}:
            every = it.pool.k, it.pool.v, it.pool.slots[: end - begin], stored
            (*here, moved), (*there, _) = copied(every, it.device), copied(every, "cpu")
            kernels.decode(*here, layout, moved, begin, backend="triton")
            kernels.decode_torch(*there, layout, stored, begin)
            yield same_bits([*here[0], *here[1]], [*there[0], *there[1]])


CHECKS: dict[str, tuple[float, Callable[[Trial], Iterator[float]]]] = {
    "key_norm": (SUMS, lambda it: iter([it.scored(key_norm, key_norm_torch, it.pool.k, it.pool.slots)])),
    "value_key_ratio": (
        SUMS,
        lambda it: iter([it.scored(value_key_ratio, value_key_ratio_torch, it.pool.k, it.pool.v, it.pool.slots)]),
    ),
    "key_difference": (
        SUMS,
        lambda it: iter([it.scored(key_difference, key_difference_torch, it.pool.k, it.pool.slots)]),
    ),
    "page_mean": (SUMS, _page_mean),
    "redundancy": (SUMS, _redundancy),
    "window_attention": (DOTS, _window_attention),
    "select_survivors": (0.0, _select),
    "compact": (0.0, _compact),
    "fill_holes": (0.0, _fill_holes),
    "gather": (0.0, _gather),
    "scatter": (0.0, _scatter),
    "encode": (0.0, _encode),
    "decode": (0.0, _decode),
}
"""By kernel: the error allowed, 0 where every bit counts, and what yields errors."""
