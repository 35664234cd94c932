"""Paired confidence intervals of differences between two sets of scores of the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_NORMAL = 1.959964
MIN_CONTEXTS = 6
"""With fewer there is no interval."""


def paired_interval(scores: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean of ``scores - others`` over all questions, and the ends of its 95 % interval.

    Questions about one context share what was dropped of it, so contexts are the units: the variance is that of the
    ratio of the sum of differences to the number of questions, by context (Cochran 1977, section 6.3). The interval is
    infinite below ``MIN_CONTEXTS`` contexts. Raises ValueError where the two are not of the same questions.
    """
    if [len(row) for row in scores] != [len(row) for row in others] or not any(map(len, scores)):
        raise ValueError("the scores are of other questions than those they are compared with: expected the same")
    sums = np.array([math.fsum(row) - math.fsum(other) for row, other in zip(scores, others, strict=True)])
    counts = np.array([len(row) for row in scores], dtype=np.float64)
    mean, num_free = float(sums.sum() / counts.sum()), len(sums) - 1
    if len(sums) < MIN_CONTEXTS:
        return mean, -math.inf, math.inf
    residuals = sums - mean * counts
    error = math.sqrt(float((residuals**2).sum()) * len(sums) / num_free) / float(counts.sum())
    return mean, mean - _quantile(num_free) * error, mean + _quantile(num_free) * error


def _quantile(num_free: int) -> float:
    """The 97.5 % point of Student's t (Abramowitz and Stegun 26.7.5, two terms)."""
    z = _NORMAL
    return z + (z**3 + z) / (4 * num_free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * num_free**2)
