"""Paired differences between what is kept, on held-out questions, as lines of `make show-budgets`."""

from __future__ import annotations

from dataclasses import dataclass

from evicbench.budgets.questions import Scores, mean
from sglang_evicpress.search.intervals import paired_interval


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of ``scores - others`` with its 95 % interval, all as F1."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, scores: Scores, others: Scores) -> Difference:
        return cls(*paired_interval(scores, others))

    def __str__(self) -> str:
        return f"{self.mean:+.4f} (95 % {self.low:+.4f} to {self.high:+.4f})"


def better(scores: dict[str, Scores], names: tuple[str, ...]) -> str:
    """The name whose scores have the largest mean."""
    return max(names, key=lambda name: mean(scores[name]))
