"""Shared parts of all kernels: the checked shape of a paged KV pool, its pointer table, the choice of backend.

A pool is one contiguous tensor ``[num_slots, num_heads, head_dim]`` per layer for K and one for V, as the
``MHATokenToKVPool`` of SGLang holds them. A node is ``slots``, int64 ``[n]``: its tokens' slots, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Backend = Literal["auto", "triton", "torch"]

# The jit decorator decides once, at import, whether kernels are interpreted (TRITON_INTERPRET=1) or compiled.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Rows move as integers of their width, so that no bit of a NaN or a subnormal can change.
_INTEGERS = {2: tl.int16, 4: tl.int32}
_TILE_ELEMENTS = 4096
ACCESS_BYTES = 16
_FEW_BUFFERS = 2  # K and V of one layer


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Extent of a pool, equal in all its layers."""

    num_layers: int
    num_slots: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@triton.jit
def layer_pointer(table: tl.tensor, layer: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    # A pointer read from a table has no known alignment: without the hint every access is one element wide.
    return tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_rows(
    rows: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    inside: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    # One head of the slots that these tokens lie in; rows of tokens that are not inside are zero.
    dims = tl.arange(0, BLOCK_DIM)
    slot = tl.load(slots + tokens, mask=inside, other=0).to(tl.int64)
    offset = (slot[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    return tl.load(rows + offset, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


def check_pool(
    buffers: Sequence[Tensor], slots: Tensor, dtypes: Collection[torch.dtype] | None = tuple(TRITON_DTYPES)
) -> PoolShape:
    """Return the shape of the pool. Reads no tensor content: a slot outside the pool is the caller's error.

    Raises ValueError when layers differ in shape, dtype or device, when one is not contiguous, when the dtype is not
    among ``dtypes`` (None: whoever only moves bits takes any), or when ``slots`` is not int64 ``[n]`` on the device of
    the pool.
    """
    if not buffers:
        raise ValueError("a pool needs at least one layer")
    first = buffers[0]
    if first.dim() != 3:
        raise ValueError(f"a layer is {tuple(first.shape)}: expected [num_slots, num_heads, head_dim]")
    if dtypes is not None and first.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"a pool is of {first.dtype}: expected {' or '.join(names.rsplit(', ', 1))}")
    for buffer in buffers:
        if buffer.shape != first.shape or buffer.dtype != first.dtype or buffer.device != first.device:
            raise ValueError("all layers of a pool must agree in shape, dtype and device")
        if not buffer.is_contiguous():
            raise ValueError("a layer of a pool must be contiguous")
    if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != first.device:
        raise ValueError(
            f"slots is {slots.dtype} {tuple(slots.shape)} on {slots.device}: expected int64 [n] on {first.device}"
        )
    num_slots, num_heads, head_dim = first.shape
    return PoolShape(len(buffers), num_slots, num_heads, head_dim, first.dtype, first.device)


def check_pools(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    dtypes: Collection[torch.dtype] | None = tuple(TRITON_DTYPES),
) -> PoolShape:
    """``check_pool`` of K, and of V, which must be alike."""
    pool = check_pool(k_buffers, slots, dtypes)
    if check_pool(v_buffers, slots, dtypes) != pool:
        raise ValueError("k_buffers and v_buffers must have the same layers, shape and dtype")
    return pool


def check_stored(pool: PoolShape, stored: Tensor, num_bytes: int, table: Tensor | None) -> None:
    """Raise ValueError unless ``stored`` has a row of so many bytes for each layer, uint8 ``[num_layers, num_bytes]``,
    and ``table``, where there is one, an address for K and for V of each."""
    if table is not None and (
        table.dtype != torch.uint64 or table.shape != (2 * pool.num_layers,) or table.device != pool.device
    ):
        raise ValueError(f"table is {table.dtype} {tuple(table.shape)}: expected uint64 [{2 * pool.num_layers}]")
    expected = (pool.num_layers, num_bytes)
    is_alike = stored.dtype == torch.uint8 and stored.shape == expected and stored.device == pool.device
    if not is_alike or not stored.is_contiguous() or stored.data_ptr() % ACCESS_BYTES:
        raise ValueError(
            f"stored is {stored.dtype} {tuple(stored.shape)} on {stored.device}: expected contiguous torch.uint8 "
            f"{expected} on {pool.device}, from a {ACCESS_BYTES}-byte boundary on"
        )


def check_flag(pool: PoolShape, flag: Tensor) -> None:
    """Raise ValueError unless ``flag`` is int32 ``[1]`` on the pool's device."""
    if flag.dtype != torch.int32 or flag.shape != (1,) or flag.device != pool.device:
        raise ValueError(f"flag is {flag.dtype} {tuple(flag.shape)} on {flag.device}: expected int32 [1]")


def runs_triton(backend: Backend, device: torch.device) -> bool:
    """True if Triton is to be launched: ``auto`` does on CUDA only; ``triton`` on the CPU needs the interpreter.

    Raises ValueError for another name, and for ``triton`` where the kernels, as imported, cannot run.
    """
    can_run = (device.type == "cuda") != IS_INTERPRETED
    if backend == "auto":
        return can_run and not IS_INTERPRETED
    if backend == "torch":
        return False
    if backend != "triton":
        raise ValueError(f"backend {backend!r} is not known: expected auto, triton or torch")
    if not can_run:
        mode = "interpreted (TRITON_INTERPRET=1)" if IS_INTERPRETED else "compiled"
        raise ValueError(f"backend 'triton' cannot run on {device}: the kernels were imported {mode}")
    return True


def pointer_table(buffers: Sequence[Tensor]) -> Tensor:
    """Return the uint64 addresses of the layers, on their device; one host copy per distinct pool.

    Raises ValueError for a layer that does not start on a 16-byte boundary.
    """
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    if any(address % ACCESS_BYTES for address in addresses):
        raise ValueError(f"a layer of a pool must start on a {ACCESS_BYTES}-byte boundary")
    return (_table_of_pool if len(addresses) > _FEW_BUFFERS else _table_of_few)(addresses, buffers[0].device)


def _pointer_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.uint64, device=device)


# Rows that only one call sees come by themselves, with new addresses each time, and must not push out those of a pool,
# whose next copy would wait for what is queued on the device.
_table_of_pool = functools.lru_cache(maxsize=16)(_pointer_table)
_table_of_few = functools.lru_cache(maxsize=16)(_pointer_table)


def block_dim(head_dim: int) -> int:
    """The power of two that covers a head, at least the 16 a matrix unit needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_constants(
    num_heads: int, head_dim: int, dtype: torch.dtype, num_elements: int = _TILE_ELEMENTS
) -> dict[str, object]:
    """Launch constants of a kernel that streams tokens of one head: tiles of about so many elements."""
    columns = block_dim(head_dim)
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DTYPE": TRITON_DTYPES[dtype],
        "BLOCK_TOKENS": max(16, num_elements // columns),
        "BLOCK_DIM": columns,
        "num_warps": 4,
    }


def move_constants(
    num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype, tile_bytes: int
) -> dict[str, object]:
    """Launch constants of a kernel that moves rows of one head within the layers, in tiles of about ``tile_bytes``."""
    columns = block_dim(head_dim)
    return {
        "NUM_LAYERS": num_layers,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DTYPE": _INTEGERS[dtype.itemsize],
        "BLOCK_TOKENS": max(16, tile_bytes // (columns * dtype.itemsize)),
        "BLOCK_DIM": columns,
        "num_warps": 4,
    }


def gather_layer(buffer: Tensor, slots: Tensor) -> Tensor:
    """Return the float32 ``[n, num_heads, head_dim]`` rows of one layer, always a copy."""
    return buffer.index_select(0, slots).float()
