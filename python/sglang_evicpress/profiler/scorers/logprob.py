"""Quality from log-probabilities: how much less likely an answer's tokens become. Needs no judge and no generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sglang_evicpress.profiler.engine import Answer, Likelihood

FLOOR = -100.0
"""Log-probabilities below this count as this: a mean over one probability of 0 would say nothing of the others."""


@dataclass(frozen=True, slots=True)
class LogProb:
    """exp(-d), d in nats: by how much the mean log-probability of the exact answer's tokens drops on the form.

    It is the geometric mean, over the tokens, of how much less likely each became; at most 1, as a form that finds the
    answer likelier than exact KV does is not better for it. An empty answer cannot become less likely: 1.
    """

    name: ClassVar[str] = "logprob"
    needs_generation: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def prepare(self, texts: Sequence[str]) -> None:
        """Nothing."""

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        if likelihood is None:
            raise ValueError("scorer logprob has likelihood None: expected that of the exact answer's tokens")
        if len(likelihood.logprobs) != len(exact.logprobs):
            found, wanted = len(likelihood.logprobs), len(exact.logprobs)
            raise ValueError(f"likelihood is of {found} tokens: expected the {wanted} tokens of the exact answer")
        return _quality(exact.logprobs, likelihood.logprobs)


def observed_quality(served: Likelihood) -> float:
    """Quality of a served answer that was decoded greedily, by its likelihood under exact KV: exp(-d), at most 1.

    d is by how much its mean log-probability lies below that of the likeliest tokens. Raises ValueError when ``served``
    lacks those.
    """
    if len(served.best) != len(served.logprobs):
        raise ValueError(f"likelihood has {len(served.best)} of best: expected one for each of {len(served.logprobs)}")
    return _quality(served.best, served.logprobs)


def _quality(before: Sequence[float], after: Sequence[float]) -> float:
    if not before:
        return 1.0
    if not all(value < math.inf for value in (*before, *after)):
        raise ValueError("an answer has a log-probability of NaN or infinity: expected numbers of at most 0")
    drops = (max(FLOOR, was) - max(FLOOR, now) for was, now in zip(before, after, strict=True))
    return math.exp(-max(0.0, math.fsum(drops) / len(before)))
