"""Survivors in other numbers: per layer, and per head of a layer by scores compared across its heads.

What layers keep is chosen here alone: in a search, where scores are kept and budgets change, in the pool of a server,
and on the way to a lower tier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_evicpress.kernels.select import select_survivors

SAFEGUARD = 0.2
"""Share of the mean that every head keeps (Ada-KV, arXiv 2407.11550, section 4: alpha 0.2)."""


def select_by_layer(scores: Tensor, num_kept: Sequence[int]) -> list[Tensor]:
    """Per layer the best of each head by ``press.scored``, int32 [kv_heads, num_kept of the layer], ascending; ties
    keep the lower index. Equal numbers give what ``press.select`` gives. Layers of one number are chosen from at once.
    Raises ValueError unless there is one number in [0, n] a layer."""
    if len(num_kept) != len(scores):
        raise ValueError(f"{len(num_kept)} numbers to keep are given: expected one for each of {len(scores)} layers")
    chosen = dict[int, Tensor]()
    for count in set(num_kept):
        layers = [layer for layer, each in enumerate(num_kept) if each == count]
        survivors = select_survivors(scores if len(layers) == len(scores) else scores[layers], count)
        chosen.update(zip(layers, survivors, strict=True))
    return [chosen[layer] for layer in range(len(scores))]


def select_across_heads(scores: Tensor, num_kept: int, safeguard: float = SAFEGUARD) -> Tensor:
    """Survivors of one layer whose heads share ``kv_heads * num_kept`` slots: bool [kv_heads, n] of fp32 scores of that
    shape (Ada-KV, arXiv 2407.11550, algorithm 1 with the safeguard of section 4).

    Every head keeps its best ``floor(safeguard * num_kept)``; the other slots go to the best scores that are left,
    whichever head has them. Ties keep the lower head, then the lower index; a score that is not a number ranks last.
    Raises ValueError for a number outside [0, n] and a safeguard outside [0, 1].
    """
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype} {tuple(scores.shape)}: expected float32 [heads, n]")
    heads, n = scores.shape
    if not 0 <= num_kept <= n:
        raise ValueError(f"num_kept is {num_kept}: expected between 0 and {n}")
    if not 0.0 <= safeguard <= 1.0:
        raise ValueError(f"safeguard is {safeguard}: expected between 0 and 1")
    safe = select_survivors(scores[None], int(safeguard * num_kept))[0].long()
    is_safe = torch.zeros(heads, n, dtype=torch.bool, device=scores.device).scatter_(1, safe, True)
    least = torch.finfo(torch.float32).min  # above what is safe already
    left = scores.nan_to_num(nan=least, posinf=torch.inf, neginf=least).masked_fill(is_safe, -torch.inf)
    others = select_survivors(left.view(1, 1, -1), heads * num_kept - safe.numel())[0, 0].long()
    return is_safe.view(-1).scatter(0, others, True).view(heads, n)
