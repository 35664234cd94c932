"""Online non-negative least squares, robust against stalls and quick to follow a change.

Fitted to a bounded window of observations by exponentially weighted least squares on relative errors. The weights are
Huber's (Robust Estimation of a Location Parameter, 1964), so that a stall counts for little; while the recent
predictions are wrong, old observations are forgotten faster (a variable forgetting factor; Fortescue, Kershenbaum,
Ydstie, Automatica 17(6), 1981).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from operator import mul

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
        self._anchor = start
        self._clock = 0.0
        self._hasty = False
        self._rows: deque[tuple[tuple[float, ...], float, float]] = deque(maxlen=_WINDOW)  # terms, seconds, birth

    def observe(self, terms: tuple[float, ...], seconds: float) -> None:
        """``terms``: one value above 0 per coefficient; ``seconds``: what the sum came to."""
        self._clock += _HASTY if self._hasty else _STEADY
        self._rows.append((terms, clamped_seconds(seconds), self._clock))
        while self._clock - self._rows[0][2] > _FORGOTTEN:
            self._rows.popleft()
        rows, took, births = zip(*self._rows, strict=True)
        columns = list(zip(*rows, strict=True))
        weights = [math.exp(birth - self._clock) for birth in births]
        anchored = _weighted_sum(self._anchor, columns)
        scale = weighted_median([y / p for y, p in zip(took, anchored, strict=True)], weights) if all(anchored) else 1.0
        expected = [scale * coefficient for coefficient in self._anchor]
        for _ in range(_PASSES):
            self.cost = _refined(self.cost, columns, took, weights, expected)
        self._anchor = tuple(old + _ANCHOR_RATE * (new - old) for old, new in zip(expected, self.cost, strict=True))
        fitted = _weighted_sum(self.cost, columns)
        errors = [abs(math.log(y / p)) for y, p in zip(took, fitted, strict=True)]
        was_hasty = self._hasty
        self._hasty = sum(min(error, _MOST_WRONG) for error in errors[-_RECENT:]) > _WRONG * _RECENT
        if was_hasty and not self._hasty:
            # The cost has caught up with a change: what it left behind is not to pull it back.
            fitting = [row for row, error in zip(self._rows, errors, strict=True) if error < _LEFT_BEHIND]
            self._rows = deque(fitting, maxlen=_WINDOW)


def _refined(
    cost: tuple[float, ...],
    columns: Sequence[Sequence[float]],
    took: Sequence[float],
    weights: Sequence[float],
    expected: Sequence[float],
) -> tuple[float, ...]:
    """One step of iteratively reweighted least squares from ``cost``.

    ``columns`` holds per term its value in each observation. Unknown is the share each term has in a typical
    duration, which makes all numbers of the order of 1.
    """
    # A cost of zeros predicts nothing yet: the observed durations stand in.
    predicted = [p or y for p, y in zip(_weighted_sum(cost, columns), took, strict=True)]
    ratios = [y / p for y, p in zip(took, predicted, strict=True)]
    pulls = [w * _HUBER / max(abs(ratio - 1.0), _HUBER) for w, ratio in zip(weights, ratios, strict=True)]
    total = sum(pulls)
    shares = []  # of each term in each predicted duration, then in units of the typical share
    reach = []
    for column in columns:
        share = [x / p for x, p in zip(column, predicted, strict=True)]
        reach.append(_dot(pulls, share) / total)
        shares.append([value / reach[-1] for value in share])
    gram = [[0.0] * len(cost) for _ in cost]
    right = [0.0] * len(cost)
    for i, share in enumerate(shares):
        pulled = list(map(mul, pulls, share))
        right[i] = _dot(pulled, ratios)
        for j in range(i + 1):
            gram[i][j] = gram[j][i] = _dot(pulled, shares[j])
        prior = expected[i] * reach[i]
        trust = _PRIOR / max(prior, _PRIOR_SHARE) ** 2
        gram[i][i] += trust
        right[i] += trust * prior
    return tuple(share / unit for share, unit in zip(_non_negative(gram, right), reach, strict=True))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total: float = sum(map(mul, left, right))
    return total


def _weighted_sum(cost: Sequence[float], columns: Sequence[Sequence[float]]) -> list[float]:
    """Prediction of ``cost`` for each observation: the sum over terms of coefficient times value."""
    return [_dot(cost, terms) for terms in zip(*columns, strict=True)]


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The first of the sorted values with half of all weight up to it."""
    half = sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        half -= weight
        if half <= 0.0:
            return value
    return max(values)  # only by rounding


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
