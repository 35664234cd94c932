"""Scores of the slots of a running request, its survivors, and its pages of the lowest score.

A request is given as a ``PressInput``: ``slots`` is its row, ``positions`` its position map, which after
hole-filling is not ascending. Scratch grows with the number of slots, never with its square, and nothing waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.geometry.score import geometry_scores
from sglang_evicpress.kernels.redundancy import redundancy
from sglang_evicpress.kernels.score import key_difference, key_norm, page_mean, value_key_ratio
from sglang_evicpress.kernels.select import select_survivors
from sglang_evicpress.kernels.window_attention import window_attention
from sglang_evicpress.press.base import PressInput

_IMPORTANCE_SHARE = 0.5  # of r_kv's score; importance is a rank and redundancy a cosine, so they weigh alike
_RECENT = 2.0**20  # above every score of a slot that is not recent


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R rows of n slots each, scored together.

    ``k_buffers`` and ``v_buffers`` hold one pool tensor [num_slots, H, D] per layer; ``slots`` is int64 [R, n],
    ``positions`` int32 [L, H, R, n]: what each slot holds. ``queries`` [L, R, W, Hq, D] are the last of each row, after
    RoPE, at ``query_positions`` int64 [R, W]; None without any. ``scale`` is the attention's factor on q.k,
    ``geometry`` what was calibrated of the model's queries.
    """

    k_buffers: Sequence[Tensor]
    v_buffers: Sequence[Tensor]
    slots: Tensor
    positions: Tensor
    queries: Tensor | None
    query_positions: Tensor | None
    scale: float
    geometry: QueryGeometry | None = None

    @classmethod
    def of(cls, node: PressInput, geometry: QueryGeometry | None = None) -> Rows:
        """One row."""
        window = node.window
        queries = None if window is None else window.queries.unsqueeze(1)
        at = None if window is None else window.positions.unsqueeze(0)
        slots, positions = node.slots.unsqueeze(0), node.positions.unsqueeze(2)
        return cls(node.k_buffers, node.v_buffers, slots, positions, queries, at, node.scale, geometry)


def score(name: str, node: PressInput, window: int, geometry: QueryGeometry | None = None) -> Tensor:
    """fp32 [L, H, n]: ``score_rows`` of one row."""
    return score_rows(name, Rows.of(node, geometry), window).squeeze(2)


def score_rows(name: str, rows: Rows, window: int) -> Tensor:
    """fp32 [L, H, R, n], one figure per slot by the score of ``SCORES``; the higher survives, one that is not a number
    goes first. The launches are as many for R rows as for one, and a row's scores do not depend on the others.

    ``window``: how many of the last queries and keys a score looks at. Raises ValueError for another name, and for a
    window below 1, or rows without queries or geometry, where the score needs them.
    """
    if name not in SCORES:
        raise ValueError(f"score {name!r} is not known: expected one of {', '.join(SCORES)}")
    score = SCORES[name]
    if score.reads_window and window < 1:
        raise ValueError(f"the window of {name} is {window}: expected at least 1")
    if score.needs_queries and rows.queries is None:
        raise ValueError(f"the queries of {name} are missing: expected the last ones of each row")
    if score.needs_geometry and rows.geometry is None:
        raise ValueError(f"the geometry of queries of {name} is missing: expected that of the model")
    return score.compute(rows, window)


def survivors(scores: Tensor, positions: Tensor, num_kept: int, sinks: int, *, in_order: bool) -> Tensor:
    """int32 [L, H, ..., num_kept], ascending indices of the slots that stay; of equal scores the earlier position
    stays. ``scores`` and ``positions`` are [L, H, ..., n].

    Slots of positions below ``sinks`` stay whatever their score. ``in_order`` says that ``positions`` ascend; if
    not, ties are broken by position all the same, so that a request keeps the same tokens whichever way it was
    compacted before. Raises ValueError when ``num_kept`` is not between 1 and n.
    """
    if not 1 <= num_kept <= scores.shape[-1]:
        raise ValueError(f"cannot keep {num_kept} of {scores.shape[-1]} slots: expected 1 to {scores.shape[-1]}")
    scores = scores.masked_fill(positions < sinks, float("inf"))
    if in_order:
        return _select(scores, num_kept)
    order = positions.argsort(-1)
    kept = order.gather(-1, _select(scores.gather(-1, order), num_kept).long())
    return kept.sort(-1).values.int()


def _select(scores: Tensor, num_kept: int) -> Tensor:
    return select_survivors(scores.flatten(1, -2), num_kept).view(*scores.shape[:-1], num_kept)


def page_means(scores: Tensor, page_size: int) -> Tensor:
    """fp32 [..., ceil(n / page_size)] of ``scores`` [L, H, ..., n]: the mean score of each page over its slots, layers
    and heads (PagedEviction, algorithm 1, "block"; the pages of SGLang hold all layers and heads, so that one choice is
    made for all)."""
    means = page_mean(scores.flatten(1, -2), page_size).view(*scores.shape[:-1], -1)
    # Wide sums: the order in which a device adds up, which may change with the rows beside, does not show.
    return means.mean((0, 1), dtype=torch.float64).float()


def worst_pages(means: Tensor, protected: tuple[int, int], num_pages: int = 1) -> Tensor:
    """int64 [..., num_pages], ascending: of each row of ``means`` [..., pages] the pages of the lowest mean, the first
    of equal ones (PagedEviction, algorithm 3). ``protected``: how many at the front and at the end are left out.

    A mean that is not a number counts as the lowest. Raises ValueError when too few pages are unprotected.
    """
    begin, end = protected[0], means.shape[-1] - protected[1]
    if not 0 < num_pages <= end - begin:
        free = max(0, end - begin)
        raise ValueError(f"cannot free {num_pages} pages: {free} of {means.shape[-1]} are not protected")
    open_to = means[..., begin:end].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return open_to.argsort(stable=True)[..., :num_pages].sort().values + begin


def without_pages(values: Tensor, dropped: Tensor, page_size: int) -> Tensor:
    """[..., R, n - p * page_size] of ``values`` [..., R, n]: each row without its pages ``dropped`` (int64 [R, p],
    ascending), in order; what lies behind the last whole page stays at the end."""
    num_pages, num_dropped = values.shape[-1] // page_size, dropped.shape[-1]
    order = torch.arange(num_pages - num_dropped, device=values.device).expand(len(dropped), -1)
    for page in dropped.unbind(-1):
        order = order + (order >= page[:, None])
    whole = num_pages * page_size
    kept = pages_of(values, order, page_size)
    return kept if whole == values.shape[-1] else torch.cat([kept, values[..., whole:]], -1)


def pages_of(values: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """[..., R, p * page_size] of ``values`` [..., R, n]: the pages (int64 [R, p]) of each row, one after the other."""
    inside = torch.arange(page_size, device=values.device)
    index = (pages[..., None] * page_size + inside).flatten(-2)
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


def _attention(rows: Rows, window: int) -> Tensor:
    """fp32 [L, H, R, n]: attention of the last ``window`` queries, mean over them and over the heads of a group."""
    assert rows.queries is not None and rows.query_positions is not None
    queries, at = rows.queries[:, :, -window:], rows.query_positions[:, -window:]
    attention = window_attention(queries, rows.k_buffers, rows.slots, at, rows.positions, rows.scale)
    num_layers, num_heads, num_rows, num_slots = rows.positions.shape
    return attention.view(num_layers, num_heads, -1, num_rows, num_slots).mean(2)


def _newest_first(scores: Tensor, rows: Rows, window: int) -> Tensor:
    """The ``window`` newest slots of each head above all others, the latest highest."""
    newest = rows.positions.topk(min(window, rows.positions.shape[-1]), dim=-1)
    lead = torch.arange(newest.values.shape[-1], 0, -1, dtype=torch.float32, device=scores.device)
    return scores.scatter(-1, newest.indices, (_RECENT + lead).expand_as(newest.values))


def _ranks(values: Tensor) -> Tensor:
    """The share of the others that are lower, 0 to 1; equal values rank alike, what is no number ranks lowest."""
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lower = torch.searchsorted(values.sort(-1).values, values.contiguous())
    return lower.float() / max(1, values.shape[-1] - 1)


def _value_key_ratio(rows: Rows, window: int) -> Tensor:
    """PagedEviction, sections 4.1 and 5.2; by each slot alone, as the press of that name."""
    return value_key_ratio(rows.k_buffers, rows.v_buffers, rows.slots.flatten()).view(rows.positions.shape)


def _knorm(rows: Rows, window: int) -> Tensor:
    """By each slot alone, as the press of that name."""
    return key_norm(rows.k_buffers, rows.slots.flatten()).view(rows.positions.shape).neg()


def _h2o(rows: Rows, window: int) -> Tensor:
    """Attention of the last ``window`` queries, added up; the ``window`` newest slots come first. An approximation: H2O
    (arXiv 2306.14048) adds up over all queries, which no fused attention kernel reports."""
    assert rows.queries is not None
    num_queries = min(window, rows.queries.shape[2])
    return _newest_first(_attention(rows, window).mul_(num_queries), rows, window)


def _r_kv(rows: Rows, window: int) -> Tensor:
    """Share of rank-normalised importance minus redundancy, the mean cosine with the ``window`` newest keys, which come
    first themselves (after R-KV, arXiv 2505.24133). Importance is the attention of the last queries where the rows have
    them, else the value to key ratio."""
    importance = _value_key_ratio(rows, window) if rows.queries is None else _attention(rows, window)
    recent = rows.positions.topk(min(window, rows.positions.shape[-1]), dim=-1).indices.int()
    repeated = redundancy(rows.k_buffers, rows.slots, recent)
    scores = _IMPORTANCE_SHARE * _ranks(importance) - (1 - _IMPORTANCE_SHARE) * repeated
    return _newest_first(scores, rows, window)


def _geometry(rows: Rows, window: int) -> Tensor:
    """By the queries expected from the newest position of each row on, as the press of that name (after TriAttention,
    arXiv 2604.04921)."""
    assert rows.geometry is not None
    last = rows.positions.amax((0, 1, 3)).to(torch.int64)
    return geometry_scores(rows.geometry, rows.k_buffers, rows.slots, last)


@dataclass(frozen=True, slots=True)
class Score:
    """``compute`` gives fp32 [L, H, R, n] of rows and a window. ``sorts_rows``: each pass sorts the whole row."""

    compute: Callable[[Rows, int], Tensor]
    reads_window: bool = False
    needs_queries: bool = False
    needs_geometry: bool = False
    sorts_rows: bool = False


SCORES: dict[str, Score] = {
    "value_key_ratio": Score(_value_key_ratio),
    "knorm": Score(_knorm),
    # By the mean of each row, and by position, as the presses of these names.
    "keydiff": Score(lambda rows, window: key_difference(rows.k_buffers, rows.slots)),
    "streaming": Score(lambda rows, window: rows.positions.to(torch.float32)),
    "geometry": Score(_geometry, needs_geometry=True),
    "r_kv": Score(_r_kv, reads_window=True, sorts_rows=True),
    # The last query alone (TOVA, arXiv 2401.06104, which averages over all heads of a layer, not of a group).
    "tova": Score(lambda rows, window: _attention(rows, 1), reads_window=True, needs_queries=True),
    "h2o": Score(_h2o, reads_window=True, needs_queries=True),
}
