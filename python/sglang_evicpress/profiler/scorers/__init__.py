"""Scorers: how near an answer on compressed KV is to the answer on exact KV, in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_evicpress.profiler.engine import Answer, Likelihood

SCORERS = ("logprob", "minilm", "f1", "exact", "rouge-l")


class Scorer(Protocol):
    """One way to compare; names in a profile which one its figures come from."""

    @property
    def name(self) -> str: ...

    @property
    def needs_generation(self) -> bool:
        """True if an answer is generated on the form; else one forward over the exact answer is enough."""

    @property
    def needs_reference(self) -> bool:
        """True if it compares with the reference answer of a question that has one (with the exact one otherwise)."""

    def prepare(self, texts: Sequence[str]) -> None:
        """Do now, many at a time, what ``score`` would do for each of these answers alone. May be left out."""

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        """In [0, 1]. ``exact`` was answered on exact KV, ``given`` on the form; ``likelihood`` is that of the tokens
        of ``exact`` on the form. Raises ValueError when the one that it compares is None.
        """


def get_scorer(name: str) -> Scorer:
    """Raises ValueError for an unknown name, and for one whose package is not installed."""
    match name:
        case "logprob":
            from sglang_evicpress.profiler.scorers.logprob import LogProb

            return LogProb()
        case "minilm":
            from sglang_evicpress.profiler.scorers.minilm import MiniLM

            return MiniLM()
        case "f1" | "exact" | "rouge-l":
            from sglang_evicpress.profiler.scorers.reference import WordOverlap

            return WordOverlap(name)
    raise ValueError(f"scorer {name!r:.100} is unknown: expected one of {', '.join(SCORERS)}")
