"""Selection of survivors: per layer and head the indices of the largest scores, ascending, deterministic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_evicpress.kernels.pool import Backend, runs_triton

SELECT_CONSTANTS: dict[str, object] = {"BLOCK": 2048, "num_warps": 8}


@triton.jit
def _load_ordered(scores: tl.tensor, tokens: tl.tensor, num_tokens: tl.tensor) -> tl.tensor:
    # uint32 that sorts as the scores do: both zeros equal, NaN below minus infinity
    score = tl.load(scores + tokens, mask=tokens < num_tokens, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    ordered = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score != score, tl.zeros_like(ordered), ordered)


@triton.jit(do_not_specialize=["num_tokens", "num_kept"])
def _select_survivors_kernel(
    scores: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_kept: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # Radix select: four histograms of eight bits find the threshold, a fifth pass writes what lies above it.
    row = tl.program_id(0).to(tl.int64)
    scores += row * num_tokens
    out += row * num_kept
    digits = tl.arange(0, 256)
    threshold = tl.zeros([], tl.uint32)
    wanted = tl.zeros([], tl.int32) + num_kept
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, num_tokens, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            ordered = _load_ordered(scores, tokens, num_tokens)
            top = ordered >> (24 - 8 * step)
            candidate = (tokens < num_tokens) & ((top >> 8) == threshold)
            counts += tl.histogram((top & 255).to(tl.int32), 256, mask=candidate)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        threshold = (threshold << 8) | digit.to(tl.uint32)
    num_ties = tl.zeros([], tl.int32)
    num_written = tl.zeros([], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        ordered = _load_ordered(scores, tokens, num_tokens)
        tie = inside & (ordered == threshold)
        tie_rank = num_ties + tl.cumsum(tie.to(tl.int32), 0)
        keep = (inside & (ordered > threshold)) | (tie & (tie_rank <= wanted))
        place = num_written + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out + place, tokens, mask=keep)
        num_ties += tl.sum(tie.to(tl.int32), 0)
        num_written += tl.sum(keep.to(tl.int32), 0)


def select_survivors(scores: Tensor, num_kept: int, *, backend: Backend = "auto") -> Tensor:
    """Indices of the ``num_kept`` largest scores of every layer and head, ascending:
    float32 ``[num_layers, num_heads, n]`` -> int32 ``[num_layers, num_heads, num_kept]``.

    Equal scores: the lower index wins. NaN counts as lower than minus infinity.
    Raises ValueError unless ``0 <= num_kept <= n``, and as ``runs_triton`` does.
    """
    if scores.dim() != 3 or scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype} {tuple(scores.shape)}: expected float32 [layers, heads, n]")
    layers, heads, n = scores.shape
    if not 0 <= num_kept <= n:
        raise ValueError(f"num_kept is {num_kept}: expected between 0 and {n}")
    if not runs_triton(backend, scores.device):
        return select_survivors_torch(scores, num_kept)
    out = torch.empty(layers, heads, num_kept, dtype=torch.int32, device=scores.device)
    if num_kept:
        grid = (layers * heads,)
        _select_survivors_kernel[grid](scores.contiguous(), out, n, num_kept, **SELECT_CONSTANTS)
    return out


def select_survivors_torch(scores: Tensor, num_kept: int) -> Tensor:
    """Reference of ``select_survivors``, and its CPU path: a threshold by partial selection, less work than a
    stable sort and as deterministic, since the threshold is a value and ties are counted."""
    layers, heads, n = scores.shape
    if num_kept == 0:
        return torch.empty(layers, heads, 0, dtype=torch.int32, device=scores.device)
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(scores.isnan(), -(2**31))
    threshold = ordered.kthvalue(n - num_kept + 1, dim=-1, keepdim=True).values
    above, ties = ordered > threshold, ordered == threshold
    wanted = num_kept - above.sum(-1, keepdim=True)
    keep = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= wanted))
    return keep.nonzero()[:, -1].view(layers, heads, num_kept).int()
