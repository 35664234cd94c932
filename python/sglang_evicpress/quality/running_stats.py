"""Running statistics of one number measured several times: count, mean, spread, a lower bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

CONFIDENCE = 1.0
"""Standard errors that the lower bound lies below the mean: of five bounds, four hold."""

PRIOR_COUNT = 2.0
"""Observations that the variance taken for granted counts for; one or two measurements show too little of their own."""


@dataclass(frozen=True, slots=True)
class RunningStats:
    """``count`` observations with their ``mean`` and ``squares``, the sum of squared differences from it (Welford).

    Nothing observed is ``RunningStats()``. Raises ValueError for a count below 0, or figures that are not finite.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.count) and self.count >= 0.0):
            raise ValueError(f"count is {self.count}: expected a finite number of at least 0")
        if not (math.isfinite(self.mean) and math.isfinite(self.squares) and self.squares >= 0.0):
            raise ValueError(
                f"mean {self.mean} and squares {self.squares}: expected finite numbers, squares at least 0"
            )

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        stats = cls()
        for value in values:
            stats = stats.plus(cls(1.0, value))
        return stats

    @property
    def variance(self) -> float:
        """Variance of the observations, unbiased; 0 while there is at most one."""
        return self.squares / (self.count - 1.0) if self.count > 1.0 else 0.0

    def plus(self, other: Self) -> Self:
        """Both together."""
        count = self.count + other.count
        if count == 0.0:
            return self
        gap, share = other.mean - self.mean, other.count / count
        return type(self)(count, self.mean + gap * share, self.squares + other.squares + gap * gap * self.count * share)

    def aged(self, max_count: float) -> Self:
        """The same mean and variance, said of at most ``max_count`` observations: newer ones soon outweigh them."""
        if self.count <= max_count:
            return self
        return type(self)(max_count, self.mean, self.variance * max(0.0, max_count - 1.0))

    def lower_bound(self, variance: float) -> float:
        """Lower confidence bound of the mean; ``variance`` is expected of such a number before anything is seen of it.

        Raises ValueError when nothing was observed.
        """
        if self.count == 0.0:
            raise ValueError("nothing was observed: expected evidence of at least one observation")
        spread = (self.squares + PRIOR_COUNT * variance) / (self.count - 1.0 + PRIOR_COUNT)
        return self.mean - CONFIDENCE * math.sqrt(spread / self.count)
