"""Which slots of a running request matter: scores per slot, the survivors, and the pages that matter least.

A request is given as a ``PressInput``: ``slots`` is its row, ``positions`` its position map, which after
hole-filling is not ascending. Scratch grows with the number of slots, never with its square, and nothing waits for
the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_evicpress.decode.settings import SCORES
from sglang_evicpress.kernels.redundancy import redundancy
from sglang_evicpress.kernels.score import page_mean, value_key_ratio
from sglang_evicpress.kernels.select import select_survivors
from sglang_evicpress.kernels.window_attention import window_attention
from sglang_evicpress.press.base import PressInput
from sglang_evicpress.press.keydiff import KeyDiff
from sglang_evicpress.press.knorm import Knorm
from sglang_evicpress.press.streaming import Streaming
from sglang_evicpress.press.value_key_ratio import ValueKeyRatio

_PRESSES = {press.name: press for press in (ValueKeyRatio(), Knorm(), KeyDiff(), Streaming())}
_IMPORTANCE_SHARE = 0.5  # of r_kv's score; importance is a rank and redundancy a cosine, so they weigh alike
_RECENT = 2.0**20  # above every score of a slot that is not recent


def score(name: str, node: PressInput, window: int) -> Tensor:
    """fp32 [L, H, n], one figure per slot; the higher survives, one that is not a number goes first.

    - ``value_key_ratio``, ``knorm``, ``keydiff``, ``streaming``: the presses of those names (PagedEviction,
      sections 4.1 and 5.2).
    - ``tova``: attention of the last query, averaged over the query heads of a kv head (TOVA, arXiv 2401.06104,
      which averages over all heads of a layer).
    - ``h2o``: attention of the last ``window`` queries, added up; the ``window`` newest slots come first. An
      approximation: H2O (arXiv 2306.14048) adds up over all queries, which no fused attention kernel reports.
    - ``r_kv``: share of rank-normalised importance minus redundancy, the mean cosine with the ``window`` newest keys,
      which come first themselves (after R-KV, arXiv 2505.24133). Importance is the attention of the last queries
      where ``node.window`` has them, else the value to key ratio.

    Raises ValueError for another name, for a window below 1 and for ``tova`` and ``h2o`` without queries.
    """
    if name in _PRESSES:
        return _PRESSES[name].score(node)
    if window < 1:
        raise ValueError(f"the window of {name} is {window}: want at least 1")
    match name:
        case "tova":
            return _attention(name, node, 1)
        case "h2o":
            return _newest_first(_attention(name, node, window).mul_(_num_queries(node, window)), node, window)
        case "r_kv":
            return _newest_first(_importance_less_redundancy(node, window), node, window)
    raise ValueError(f"score {name!r} is not known: want one of {', '.join(SCORES)}")


def survivors(scores: Tensor, positions: Tensor, num_kept: int, sinks: int, *, in_order: bool) -> Tensor:
    """int32 [L, H, num_kept], ascending indices of the slots that stay; of equal scores the earlier position stays.

    Slots of positions below ``sinks`` stay whatever their score. ``in_order`` says that ``positions`` ascend; if
    not, ties are broken by position all the same, so that a request keeps the same tokens whichever way it was
    compacted before. Raises ValueError when ``num_kept`` is not between 1 and n.
    """
    if not 1 <= num_kept <= scores.shape[-1]:
        raise ValueError(f"cannot keep {num_kept} of {scores.shape[-1]} slots: want 1 to {scores.shape[-1]}")
    scores = scores.masked_fill(positions < sinks, float("inf"))
    if in_order:
        return select_survivors(scores, num_kept)
    order = positions.argsort(-1)
    kept = order.gather(-1, select_survivors(scores.gather(-1, order), num_kept).long())
    return kept.sort(-1).values.int()


def page_means(scores: Tensor, page_size: int, *, by_rank: bool = False) -> Tensor:
    """fp32 [ceil(n / page_size)]: the mean score of each page over its slots, layers and heads (PagedEviction,
    algorithm 1, "block"; the pages of SGLang hold all layers and heads, so that one choice is made for all).

    ``by_rank`` takes the rank of a page within each (layer, head) instead, from 0 to 1, so that layers with large
    scores do not decide alone.
    """
    means = page_mean(scores, page_size)
    return (_ranks(means) if by_rank else means).mean((0, 1))


def worst_pages(means: Tensor, protect: tuple[str, ...], num_pages: int = 1) -> Tensor:
    """int64 [num_pages], ascending: the pages of the lowest mean, the first of equal ones (PagedEviction,
    algorithm 3). ``protect`` names pages to leave out, ``first`` and ``newest`` (the last).

    A mean that is not a number counts as the lowest. Raises ValueError when too few pages are unprotected.
    """
    begin, end = int("first" in protect), means.numel() - int("newest" in protect)
    if not 0 < num_pages <= end - begin:
        free = max(0, end - begin)
        raise ValueError(f"cannot free {num_pages} pages: {free} of {means.numel()} are not protected")
    open_to = means[begin:end].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return open_to.argsort(stable=True)[:num_pages].sort().values + begin


def _num_queries(node: PressInput, window: int) -> int:
    return 0 if node.window is None else min(window, node.window.queries.shape[1])


def _attention(name: str, node: PressInput, window: int) -> Tensor:
    """fp32 [L, H, n]: attention of the last ``window`` queries, mean over them and over the heads of a group."""
    if node.window is None:
        raise ValueError(f"{name} needs the last queries of the request, and it comes without them")
    queries, positions = node.window.queries[:, -window:], node.window.positions[-window:]
    attention = window_attention(queries, node.k_buffers, node.slots, positions, node.positions, node.scale)
    num_layers, num_heads, num_slots = node.positions.shape
    return attention.view(num_layers, num_heads, -1, num_slots).mean(2)


def _importance_less_redundancy(node: PressInput, window: int) -> Tensor:
    if node.window is None:
        importance = value_key_ratio(node.k_buffers, node.v_buffers, node.slots)
    else:
        importance = _attention("r_kv", node, window)
    recent = node.positions.topk(min(window, node.positions.shape[-1]), dim=-1).indices.int()
    repeated = redundancy(node.k_buffers, node.slots, recent)
    return _IMPORTANCE_SHARE * _ranks(importance) - (1 - _IMPORTANCE_SHARE) * repeated


def _newest_first(scores: Tensor, node: PressInput, window: int) -> Tensor:
    """The ``window`` newest slots of each head above all others, the latest highest."""
    newest = node.positions.topk(min(window, node.positions.shape[-1]), dim=-1)
    lead = torch.arange(newest.values.shape[-1], 0, -1, dtype=torch.float32, device=scores.device)
    return scores.scatter(-1, newest.indices, (_RECENT + lead).expand_as(newest.values))


def _ranks(values: Tensor) -> Tensor:
    """The share of the others that are lower, 0 to 1; equal values rank alike, what is no number ranks lowest."""
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lower = torch.searchsorted(values.sort(-1).values, values.contiguous())
    return lower.float() / max(1, values.shape[-1] - 1)
