"""Between the pool and one contiguous staging buffer: a node's rows of as many layers as are given, in one launch.

A staging buffer is ``[num_layers, 2, n, num_heads, head_dim]``: for each layer the K rows, then the V rows, as the
tiers keep them. Rows of any dtype move as integers, so that no bit can change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.kernels.pool import (
    ACCESS_BYTES,
    Backend,
    PoolShape,
    check_pool,
    layer_pointer,
    pointer_table,
    runs_triton,
)

_WORDS = {1: (tl.int8, torch.int8), 2: (tl.int16, torch.int16), 4: (tl.int32, torch.int32)}
_TILE_WORDS = 4096
_MOST_ROW_WORDS = 512


# Neither the number of slots nor where a caller's slots begin compiles a kernel anew while a load is waited for.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _gather_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    num_slots: tl.tensor,
    ROW_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
) -> None:
    # table holds K and V of each layer by turns; one program copies some words of some rows of one of them.
    section = tl.program_id(1)
    rows = layer_pointer(table, section, DTYPE)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    words = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = tokens < num_slots
    mask = inside[:, None] & (words < ROW_WORDS)[None, :]
    slot = tl.load(slots + tokens, mask=inside, other=0).to(tl.int64)
    place = section.to(tl.int64) * num_slots + tokens
    tile = tl.load(rows + slot[:, None] * ROW_WORDS + words[None, :], mask=mask, other=0)
    tl.store(out + place[:, None] * ROW_WORDS + words[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=["num_slots", "begin", "num_staged"], do_not_specialize_on_alignment=["slots"])
def _scatter_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    staged: tl.tensor,
    num_slots: tl.tensor,
    begin: tl.tensor,
    num_staged: tl.tensor,
    ROW_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
) -> None:
    section = tl.program_id(1)
    rows = layer_pointer(table, section, DTYPE)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    words = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = tokens < num_slots
    mask = inside[:, None] & (words < ROW_WORDS)[None, :]
    slot = tl.load(slots + tokens, mask=inside, other=0).to(tl.int64)
    place = section.to(tl.int64) * num_staged + begin + tokens
    tile = tl.load(staged + place[:, None] * ROW_WORDS + words[None, :], mask=mask, other=0)
    tl.store(rows + slot[:, None] * ROW_WORDS + words[None, :], tile, mask=mask)


def gather(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    out: Tensor,
    *,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write slot ``slots[j]`` of K and of V of every layer l to ``out[l, 0, j]`` and ``out[l, 1, j]``, bit for bit.

    ``out``: contiguous, of the pool's dtype, which may be any, from a 16-byte boundary on; rows of no multiple of 16
    bytes move in narrower accesses. ``table``: these layers' part of a ``stage_table``; without it there may be a copy
    from the host, which waits for the device.
    Raises ValueError for an ``out`` that does not fit, and as ``check_pool``, ``pointer_table`` and ``runs_triton`` do.
    """
    pool = _check(k_buffers, v_buffers, slots, table)
    expected = (pool.num_layers, 2, slots.numel(), pool.num_heads, pool.head_dim)
    if out.shape != expected or not _is_staging(out, pool):
        raise ValueError(
            f"out is {_text(out)}: expected contiguous {pool.dtype} {expected} on {pool.device}, from a "
            f"{ACCESS_BYTES}-byte boundary on"
        )
    if not runs_triton(backend, pool.device):
        gather_torch(k_buffers, v_buffers, slots, out)
    elif slots.numel():
        constants = stage_constants(_row_bytes(pool))
        if table is None:
            table = stage_table(k_buffers, v_buffers)
        arguments = table, slots.contiguous(), _words(out), slots.numel()
        _gather_kernel[_grid(pool, slots, constants)](*arguments, **constants)


def scatter(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    staged: Tensor,
    *,
    begin: int = 0,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write ``staged[l, 0, begin + j]`` and ``staged[l, 1, begin + j]`` into slot ``slots[j]`` of K and of V of every
    layer l, in place and bit for bit; other slots keep their bytes. The inverse of ``gather``.

    ``staged``: as ``out`` of ``gather``, of at least ``begin`` + n rows; ``slots`` holds no slot twice; ``table``, and
    what is raised, as there.
    """
    pool = _check(k_buffers, v_buffers, slots, table)
    shape = (pool.num_layers, 2, pool.num_heads, pool.head_dim)
    if staged.dim() != 5 or (*staged.shape[:2], *staged.shape[3:]) != shape or not _is_staging(staged, pool):
        raise ValueError(
            f"staged is {_text(staged)}: expected contiguous {pool.dtype} [{pool.num_layers}, 2, rows, "
            f"{pool.num_heads}, {pool.head_dim}] on {pool.device}, from a {ACCESS_BYTES}-byte boundary on"
        )
    if not 0 <= begin <= staged.shape[2] - slots.numel():
        raise ValueError(f"{slots.numel()} rows from {begin} on are not among the {staged.shape[2]} staged")
    if not runs_triton(backend, pool.device):
        scatter_torch(k_buffers, v_buffers, slots, staged, begin=begin)
    elif slots.numel():
        constants = stage_constants(_row_bytes(pool))
        if table is None:
            table = stage_table(k_buffers, v_buffers)
        arguments = table, slots.contiguous(), _words(staged), slots.numel(), begin, staged.shape[2]
        _scatter_kernel[_grid(pool, slots, constants)](*arguments, **constants)


def stage_table(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> Tensor:
    """Addresses of K and V by turns, uint64 ``[2 * num_layers]`` on the pool's device: layers [a, b) are its part
    [2 * a, 2 * b). Raises ValueError as ``pointer_table`` does."""
    return pointer_table([buffer for pair in zip(k_buffers, v_buffers, strict=True) for buffer in pair])


def stage_constants(row_bytes: int) -> dict[str, object]:
    """Launch constants of ``gather`` and ``scatter``: tiles of about 16 KiB, of rows of at most 2 KiB."""
    word = _word_bytes(row_bytes)
    row_words = row_bytes // word
    columns = min(_MOST_ROW_WORDS, max(16, 1 << (row_words - 1).bit_length()))
    return {
        "ROW_WORDS": row_words,
        "DTYPE": _WORDS[word][0],
        "BLOCK_TOKENS": _TILE_WORDS // columns,
        "BLOCK_WORDS": columns,
        "num_warps": 4,
    }


def gather_torch(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, out: Tensor) -> None:
    """Reference of ``gather``, and its CPU path: no scratch."""
    for layer, pair in enumerate(zip(k_buffers, v_buffers, strict=True)):
        for section, buffer in enumerate(pair):
            torch.index_select(_words(buffer), 0, slots, out=_words(out[layer, section]))


def scatter_torch(
    k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, staged: Tensor, *, begin: int = 0
) -> None:
    """Reference of ``scatter``, and its CPU path: no scratch."""
    rows = slice(begin, begin + slots.numel())
    for layer, pair in enumerate(zip(k_buffers, v_buffers, strict=True)):
        for section, buffer in enumerate(pair):
            _words(buffer).index_copy_(0, slots, _words(staged[layer, section, rows]))


def _check(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, table: Tensor | None) -> PoolShape:
    pool = check_pool(k_buffers, slots, dtypes=None)
    if check_pool(v_buffers, slots, dtypes=None) != pool:
        raise ValueError("k_buffers and v_buffers must have the same layers, shape and dtype")
    if table is not None and (
        table.dtype != torch.uint64 or table.shape != (2 * pool.num_layers,) or table.device != pool.device
    ):
        raise ValueError(f"table is {_text(table)}: expected uint64 [{2 * pool.num_layers}] on {pool.device}")
    return pool


def _is_staging(tensor: Tensor, pool: PoolShape) -> bool:
    is_alike = tensor.dtype == pool.dtype and tensor.device == pool.device
    return is_alike and tensor.is_contiguous() and tensor.data_ptr() % ACCESS_BYTES == 0


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _grid(pool: PoolShape, slots: Tensor, constants: dict[str, object]) -> tuple[int, int, int]:
    blocks = triton.cdiv(slots.numel(), constants["BLOCK_TOKENS"])
    return blocks, 2 * pool.num_layers, triton.cdiv(constants["ROW_WORDS"], constants["BLOCK_WORDS"])


def _row_bytes(pool: PoolShape) -> int:
    return pool.num_heads * pool.head_dim * pool.dtype.itemsize


def _word_bytes(row_bytes: int) -> int:
    """The widest integer that rows of so many bytes are made of."""
    return math.gcd(row_bytes, 4)


def _words(rows: Tensor) -> Tensor:
    """The rows ``[..., n, num_heads, head_dim]`` as integers ``[..., n, words]``, where they are."""
    flat = rows.flatten(-2)
    return flat.view(_WORDS[_word_bytes(flat.shape[-1] * flat.element_size())][1])
