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
    check_pools,
    layer_pointer,
    pointer_table,
    runs_triton,
)

_WORDS = {1: (tl.int8, torch.int8), 2: (tl.int16, torch.int16), 4: (tl.int32, torch.int32)}
_TILE_WORDS = 4096
_MOST_ROW_WORDS = 512


# Neither the number of slots nor where a caller's slots begin compiles a kernel anew while a load is waited for.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _stage_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    staged: tl.tensor,
    num_slots: tl.tensor,
    IS_GATHER: tl.constexpr,
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
    in_pool = rows + slot[:, None] * ROW_WORDS + words[None, :]
    in_staged = staged + place[:, None] * ROW_WORDS + words[None, :]
    if IS_GATHER:
        tl.store(in_staged, tl.load(in_pool, mask=mask, other=0), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_staged, mask=mask, other=0), mask=mask)


def gather(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    staged: Tensor,
    *,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write slot ``slots[j]`` of K and of V of every layer l to ``staged[l, 0, j]`` and ``staged[l, 1, j]``, bit for
    bit.

    ``staged``: contiguous, of the pool's dtype, which may be any, from a 16-byte boundary on; rows of no multiple of 16
    bytes move in narrower accesses. ``table``: these layers' part of a ``stage_table``; without it there may be a copy
    from the host, which waits for the device.
    Raises ValueError for buffers that do not fit, and as ``check_pool``, ``pointer_table`` and ``runs_triton`` do.
    """
    if not _launch(True, k_buffers, v_buffers, slots, staged, table, backend):
        gather_torch(k_buffers, v_buffers, slots, staged)


def scatter(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    staged: Tensor,
    *,
    table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Write ``staged[l, 0, j]`` and ``staged[l, 1, j]`` into slot ``slots[j]`` of K and of V of every layer l, in place
    and bit for bit; other slots keep their bytes. The inverse of ``gather``; ``slots`` holds no slot twice."""
    if not _launch(False, k_buffers, v_buffers, slots, staged, table, backend):
        scatter_torch(k_buffers, v_buffers, slots, staged)


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


def gather_torch(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, staged: Tensor) -> None:
    """Reference of ``gather``, and its CPU path: no scratch."""
    for layer, pair in zip(staged, zip(k_buffers, v_buffers, strict=True), strict=True):
        for section, buffer in zip(layer, pair, strict=True):
            torch.index_select(_words(buffer), 0, slots, out=_words(section))


def scatter_torch(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, staged: Tensor) -> None:
    """Reference of ``scatter``, and its CPU path: no scratch."""
    for layer, pair in zip(staged, zip(k_buffers, v_buffers, strict=True), strict=True):
        for section, buffer in zip(layer, pair, strict=True):
            _words(buffer).index_copy_(0, slots, _words(section))


def _launch(
    is_gather: bool,
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    staged: Tensor,
    table: Tensor | None,
    backend: Backend,
) -> bool:
    """Check all of it; False if it is for the torch path."""
    pool = check_pools(k_buffers, v_buffers, slots, dtypes=None)
    if table is not None and (
        table.dtype != torch.uint64 or table.shape != (2 * pool.num_layers,) or table.device != pool.device
    ):
        raise ValueError(f"table is {_text(table)}: expected uint64 [{2 * pool.num_layers}] on {pool.device}")
    expected = (pool.num_layers, 2, slots.numel(), pool.num_heads, pool.head_dim)
    is_alike = staged.shape == expected and staged.dtype == pool.dtype and staged.device == pool.device
    if not is_alike or not staged.is_contiguous() or staged.data_ptr() % ACCESS_BYTES:
        raise ValueError(
            f"staged is {_text(staged)}: expected contiguous {pool.dtype} {expected} on {pool.device}, from a "
            f"{ACCESS_BYTES}-byte boundary on"
        )
    if not runs_triton(backend, pool.device):
        return False
    if slots.numel():
        constants = stage_constants(pool.num_heads * pool.head_dim * pool.dtype.itemsize)
        if table is None:
            table = stage_table(k_buffers, v_buffers)
        blocks = triton.cdiv(slots.numel(), constants["BLOCK_TOKENS"])
        grid = blocks, 2 * pool.num_layers, triton.cdiv(constants["ROW_WORDS"], constants["BLOCK_WORDS"])
        _stage_kernel[grid](table, slots.contiguous(), _words(staged), slots.numel(), IS_GATHER=is_gather, **constants)
    return True


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _word_bytes(row_bytes: int) -> int:
    """The widest integer that rows of so many bytes are made of."""
    return math.gcd(row_bytes, 4)


def _words(rows: Tensor) -> Tensor:
    """The rows ``[..., n, num_heads, head_dim]`` as integers ``[..., n, words]``, where they are."""
    flat = rows.flatten(-2)
    return flat.view(_WORDS[_word_bytes(flat.shape[-1] * flat.element_size())][1])
