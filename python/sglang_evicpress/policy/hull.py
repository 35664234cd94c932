"""Hulls of the options of nodes: of one in plain Python, of many at once in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.policy.base import Step

Point = tuple[int, float, int]
"""(bytes, utility per use, index of the form on the menu): a state of a node on its tier."""


def upper_hull(points: Iterable[Point]) -> list[Point]:
    """The upper convex hull of (bytes, utility), from the first point given to ever fewer bytes.

    Left out are dominated points (no fewer bytes and no more utility than another) and LP-dominated ones (below a line
    between two others): the linear relaxation of the multiple-choice knapsack uses no other (Kellerer, Pferschy and
    Pisinger, Knapsack Problems, chapter on the multiple-choice knapsack; AdaptCache section 2). A point with more
    utility in fewer bytes than the first stays: the step there has a negative slope. Of points on one line all are
    kept, so that as little as possible is freed at a time; of equal points the first given counts.
    """
    given = list(points)
    hull = [given[0]]
    while (point := next_on_hull(hull[-1], given)) is not None:
        hull.append(point)
    return hull


def next_on_hull(current: Point, points: Iterable[Point]) -> Point | None:
    """The neighbour of ``current`` towards fewer bytes on the upper hull: the one with the least slope."""
    best, best_slope = None, math.inf
    for point in points:
        freed = current[0] - point[0]
        if freed > 0:
            per_byte = (current[1] - point[1]) / freed
            if best is None or per_byte < best_slope or (per_byte == best_slope and point[0] > best[0]):
                best, best_slope = point, per_byte
    return best


@dataclass(slots=True)
class HullState:
    """The next edge of a node's hull, for as long as neither the node nor a cost changes.

    ``utility`` is that of what it holds; ``shrunk`` where the in-place part of the hull goes next. ``leave`` is the
    best way off the tier when ``lowest_tier`` is the lowest tier it may move to. ``terms``: the number of those by
    which it was made. ``is_poor``: ``shrunk`` is worth less than a drop, and so for the last.
    """

    utility: float
    shrunk: Point | None
    terms: int
    lowest_tier: int = -1
    leave: Step | None = None
    leave_utility: float = -math.inf
    is_poor: bool = False


def first_points(
    num_bytes: NDArray[np.float64],
    utility: NDArray[np.float64],
    sizes: NDArray[np.float64],
    worths: NDArray[np.float64],
    is_open: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """``next_on_hull`` of N nodes at once: per node the index of the form its hull goes to first, -1 where nowhere.

    ``num_bytes`` and ``utility`` [N] of what the nodes hold, ``sizes`` and ``worths`` [N, F] of the forms,
    ``is_open`` [N, F] whether a form can be made of the node.
    """
    freed = num_bytes[:, None] - sizes
    is_open = is_open & (freed > 0)
    per_byte = np.full(sizes.shape, math.inf)
    np.divide(utility[:, None] - worths, freed, out=per_byte, where=is_open)
    is_best = is_open & (per_byte == per_byte.min(axis=1)[:, None])  # of these the largest, and of equal ones the first
    first: NDArray[np.int64] = np.where(is_best.any(axis=1), np.where(is_best, sizes, -1.0).argmax(axis=1), -1)
    return first


def sizes_of(
    kept: Sequence[float],
    slot_bytes: Sequence[float],
    page_size: int,
    num_tokens: NDArray[np.int64],
    sinks: NDArray[np.int64],
) -> NDArray[np.float64]:
    """``Menu.sizes`` of N nodes at once, [N, F]: ``kept`` and the stored ``slot_bytes`` are per form."""
    tokens = num_tokens[:, None].astype(np.float64)
    wanted = np.maximum(sinks[:, None], np.ceil(tokens * np.asarray(kept) - 1e-9))
    slots = np.minimum(tokens, np.ceil(wanted / page_size) * page_size)
    sizes: NDArray[np.float64] = np.ceil(slots * np.asarray(slot_bytes))
    return sizes
