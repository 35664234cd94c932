"""Online non-negative least squares, robust against stalls and quick to follow a change.

Fitted to a bounded window of observations by exponentially weighted least squares on relative errors. The weights are
Huber's (Robust Estimation of a Location Parameter, 1964), so that a stall counts for little; while the recent
predictions are wrong, old observations are forgotten faster (a variable forgetting factor; Fortescue, Kershenbaum,
Ydstie, Automatica 17(6), 1981).
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WINDOW = 64  # observations a cost remembers
_STEADY = -math.log(0.96)  # forgetting per observation: half the weight is on the last 17
_HASTY = -math.log(0.7)  # the same while predictions are wrong: on the last 2
_FORGOTTEN = 7.0  # older than this (weight below e**-7) is left out
_RECENT = 8  # observations that tell whether predictions are wrong,
_WRONG = 0.3  # which they are when the logarithms of their ratios come to this on average,
_MOST_WRONG = 1.5  # each counted up to this, so that one stall is not enough
_LEFT_BEHIND = 0.7  # an observation as far off as this (x2) is dropped once predictions are right again
_HUBER = 0.1  # relative error from which on an observation pulls no harder
_PRIOR = 0.02  # weight of the expected coefficients, in observations
_PRIOR_SHARE = 0.1  # a term is free to change by this share of the duration, however small it is expected
_ANCHOR_RATE = 1 / 32  # how fast the expected shape of the cost follows the fitted one
_PASSES = 3  # reweighting steps per observation; each starts where the last one ended
_MIN_SECONDS, _MAX_SECONDS = 1e-9, 1e9  # outside of what a duration can be; keeps ratios within floats
_SINGULAR = 1e-12  # of a pivot's first value


class Fit:
    """Coefficients >= 0 of a cost that is linear in its terms, fitted to the last observations.

    ``cost`` holds one coefficient per term. Expected is the starting cost (later: its slow average), scaled by one
    factor to what is observed: if the terms were observed in one proportion only, such as transfers of one size,
    the fit is that scaled cost.
    """

    __slots__ = ("_anchor", "_clock", "_hasty", "_rows", "cost")

    def __init__(self, start: tuple[float, ...]) -> None:
        self.cost = start
        self._anchor: Floats = np.array(start)
        self._clock = 0.0
        self._hasty = False
        self._rows: Floats = np.empty((0, len(start) + 2))  # terms, seconds, birth

    def observe(self, terms: tuple[float, ...], seconds: float) -> None:
        """``terms``: one value above 0 per coefficient; ``seconds``: what the sum came to."""
        self._clock += _HASTY if self._hasty else _STEADY
        newest = (*terms, clamped_seconds(seconds), self._clock)
        self._rows = np.vstack([self._rows[1 - _WINDOW :], newest])
        self._rows = self._rows[self._clock - self._rows[:, -1] <= _FORGOTTEN]
        seen, took, births = self._rows[:, :-2], self._rows[:, -2], self._rows[:, -1]
        weights = np.exp(births - self._clock)
        anchored = seen @ self._anchor
        expected: Floats = (_weighted_median(took / anchored, weights) if anchored.all() else 1.0) * self._anchor
        cost: Floats = np.array(self.cost)
        for _ in range(_PASSES):
            cost = _refined(cost, seen, took, weights, expected)
        self.cost = tuple(cost.tolist())
        self._anchor = expected + _ANCHOR_RATE * (cost - expected)
        errors = np.abs(np.log(took / (seen @ cost)))
        was_hasty = self._hasty
        self._hasty = bool(np.minimum(errors[-_RECENT:], _MOST_WRONG).sum() > _WRONG * _RECENT)
        if was_hasty and not self._hasty:
            # The cost has caught up with a change: what it left behind is not to pull it back.
            self._rows = self._rows[errors < _LEFT_BEHIND]


def _refined(cost: Floats, seen: Floats, took: Floats, weights: Floats, expected: Floats) -> Floats:
    """One step of iteratively reweighted least squares from ``cost``.

    ``seen`` [observations, terms] holds their values. Unknown is the share each term has in a typical duration, which
    makes all numbers of the order of 1.
    """
    predicted = seen @ cost
    predicted = np.where(predicted, predicted, took)  # a cost of zeros predicts nothing yet
    ratios = took / predicted
    pulls = weights * _HUBER / np.maximum(np.abs(ratios - 1.0), _HUBER)
    shares = seen / predicted[:, None]
    reach = pulls @ shares / pulls.sum()
    shares /= reach  # in units of the typical share
    pulled = shares * pulls[:, None]
    prior = expected * reach
    trust = _PRIOR / np.maximum(prior, _PRIOR_SHARE) ** 2
    gram = pulled.T @ shares + np.diag(trust)
    right = pulled.T @ ratios + trust * prior
    refined: Floats = np.array(_non_negative(gram.tolist(), right.tolist())) / reach
    return refined


def _weighted_median(values: Floats, weights: Floats) -> float:
    """The first of the sorted values with half of all weight up to it."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(sums, sums[-1] / 2)]])


def _non_negative(gram: list[list[float]], right: list[float]) -> list[float]:
    """The u >= 0 of least u' gram u / 2 - right' u, for a positive definite ``gram`` of at most 3 x 3.

    The minimum is the free minimum over those of its coordinates that are not 0. So of all sets of coordinates
    whose free minimum is >= 0 (at most 7), the one of least value is it; its value is -right' u / 2.
    """
    size = len(right)
    best, best_gain = [0.0] * size, 0.0
    for count in range(size, 0, -1):
        for kept in combinations(range(size), count):
            part = _solve([[gram[i][j] for j in kept] for i in kept], [right[i] for i in kept])
            gain = sum(right[i] * value for i, value in zip(kept, part, strict=True))
            if min(part) >= 0.0 and gain > best_gain:
                best, best_gain = [0.0] * size, gain
                for i, value in zip(kept, part, strict=True):
                    best[i] = value
        if count == size and best_gain > 0.0:
            break
    return best


def _solve(gram: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite system by elimination, in place; all -1 if it is singular to rounding."""
    size = len(right)
    least = [_SINGULAR * gram[i][i] for i in range(size)]
    for i in range(size):
        if gram[i][i] <= least[i]:
            return [-1.0] * size
        for j in range(i + 1, size):
            factor = gram[j][i] / gram[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                gram[j][k] -= factor * gram[i][k]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(gram[i][k] * right[k] for k in range(i + 1, size))) / gram[i][i]
    return right


def clamped_seconds(seconds: float) -> float:
    return min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)
