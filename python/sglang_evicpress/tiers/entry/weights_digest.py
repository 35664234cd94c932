"""Digest of every byte of a model's tensors, computed where the tensors lie: 16 bytes.

The bytes are read as 32-bit words, in chunks of ``CHUNK_WORDS``. A chunk's sum is that of its words, each times a fixed
odd 64-bit number of its place, modulo 2**64; two such sums are taken of every chunk, by independent numbers. One word
changed always changes both; rows swapped or values moved change them but with odds of about 2**-64. The sums of all
chunks come to the host at once and are hashed there with the name, shape, strides and dtype of each tensor. CPU and
CUDA give the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import torch

DIGEST_BYTES = 16
CHUNK_WORDS = 1 << 16
WORD_BYTES = 4
CHUNKS_AT_ONCE = {"cpu": 1}
"""By device type: on a CPU the temporaries of one chunk stay in its cache."""
MANY_CHUNKS = 32  # on any other device: 8 MiB of words, 32 MiB of temporaries
COPY_BYTES = 1 << 23  # of a tensor whose elements are not next to each other: copied at once


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Digest of named tensors, in their order; 16 bytes.

    Takes any strided layout, dtype and device, 0-dimensional and empty tensors, and subclasses made of other tensors.
    Raises ValueError for a tensor without bytes of its own (meta, sparse), RuntimeError when one cannot be read.
    """
    factors = cache(lambda device: _factors().to(device))  # moved to each device once
    labels: list[tuple[str, torch.device, int]] = []
    sums: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors:
            for label, part in _plain_parts(name, tensor):
                own = [each for block in _blocks(part) for each in _chunk_sums(block, factors(part.device))]
                labels.append((label, part.device, sum(map(len, own))))
                sums.setdefault(part.device, []).extend(own)
        rows = {device: _on_host(own) for device, own in sums.items()}
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"evicpressweights")
    begins = dict.fromkeys(rows, 0)
    for label, device, count in labels:
        text, begin = label.encode(), begins[device]
        begins[device] += count
        hashed.update(len(text).to_bytes(8, "little") + text + count.to_bytes(8, "little"))
        hashed.update(rows[device][begin : begin + count].tobytes())
    return hashed.digest()


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a model; one that several modules share comes once."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer


@cache
def _factors() -> torch.Tensor:
    """The fixed numbers of the places in a chunk, int64 [2, CHUNK_WORDS]."""
    drawn = hashlib.shake_256(b"evicpress weights digest 1").digest(2 * CHUNK_WORDS * 8)
    return torch.from_numpy((np.frombuffer(drawn, "<i8").astype(np.int64) | 1).reshape(2, CHUNK_WORDS))


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold the bytes of one, labelled: itself, or those that a wrapper subclass is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner_names, _ = tensor.__tensor_flatten__()
        for inner in inner_names:
            yield from _plain_parts(f"{name} {type(tensor).__name__}.{inner}", getattr(tensor, inner))
        return
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(f"{name} is {kind} on {tensor.device}: expected a strided tensor with bytes of its own")
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    yield f"{name} {tuple(plain.shape)} {plain.stride()} {plain.dtype}", plain


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a strided tensor, uint8 [n] each: all at once in the order of its storage where its elements are
    next to each other, else copies of at most ``COPY_BYTES`` in the order of its indices. Repeats of a stride of 0 come
    once."""
    for dim in range(tensor.dim() - 1, -1, -1):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.select(dim, 0)
    if tensor.numel() == 0:
        return
    if _is_dense(tensor):
        yield tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return
    row_bytes = tensor.numel() // tensor.size(0) * tensor.element_size()
    step = COPY_BYTES // row_bytes
    for begin in range(0, tensor.size(0), max(1, step)):
        if step == 0 and tensor.dim() > 1:
            yield from _blocks(tensor.select(0, begin))
        else:
            yield tensor[begin : begin + max(1, step)].contiguous().view(-1).view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one run of the storage without gap or overlap, in any order."""
    expected = 1
    for stride, size in sorted((tensor.stride(dim), tensor.size(dim)) for dim in range(tensor.dim())):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _chunk_sums(block: torch.Tensor, factor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The sums of the chunks of bytes uint8 [n]: int64 [chunks, 2] each, on the same device."""
    is_aligned = block.data_ptr() % WORD_BYTES == 0 and block.storage_offset() % WORD_BYTES == 0
    chunk_bytes = CHUNK_WORDS * WORD_BYTES
    num_whole = len(block) // chunk_bytes
    at_once = CHUNKS_AT_ONCE.get(block.device.type, MANY_CHUNKS)
    for first in range(0, num_whole, at_once):
        part = block[first * chunk_bytes : min(first + at_once, num_whole) * chunk_bytes]
        part = part if is_aligned else part.clone()
        yield _sums(part.view(torch.int32).view(-1, CHUNK_WORDS), factor)
    rest = block[num_whole * chunk_bytes :]
    if len(rest):
        num_words = -(-len(rest) // WORD_BYTES)
        padded = rest
        if not is_aligned or len(rest) % WORD_BYTES:
            padded = rest.new_zeros(num_words * WORD_BYTES)
            padded[: len(rest)] = rest
        yield _sums(padded.view(torch.int32).view(1, num_words), factor[:, :num_words])


def _sums(words: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """int64 [chunks, 2] of words int32 [chunks, n] and factors int64 [2, n]; both wrap around."""
    wide = words.to(torch.int64)
    return torch.stack([(wide * each).sum(1) for each in factor], 1)


def _on_host(sums: list[torch.Tensor]) -> np.ndarray:
    """int64 [chunks, 2] of all chunks of a device, by one transfer."""
    if not sums:
        return np.empty((0, 2), "<i8")
    return torch.cat(sums).cpu().numpy().astype("<i8", copy=False)
