"""Overlap of an answer's words with those of a reference answer, against what the exact answer has of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sglang_evicpress.profiler.engine import Answer, Likelihood


@dataclass(frozen=True, slots=True)
class WordOverlap:
    """``name`` is a key of ``MEASURES``. With a reference the score is what is left of the exact answer's measure, 1 at
    most: quality is relative to exact KV, whatever that is worth. Without one, or where the exact answer has nothing of
    it, the answer is compared with the exact one.
    """

    name: str
    needs_generation: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    def prepare(self, texts: Sequence[str]) -> None:
        """Nothing."""

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        if given is None:
            raise ValueError(f"scorer {self.name} has given None: expected the answer generated on the form")
        measure = MEASURES[self.name]
        best = 0.0 if reference is None else measure(exact.text, reference)
        if reference is None or best == 0.0:
            return measure(given.text, exact.text)
        return min(1.0, measure(given.text, reference) / best)


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over two bags of words; two answers without a word agree."""
    return _harmonic(answer, reference, lambda left, right: (Counter(left) & Counter(right)).total())


def exact_match(answer: str, reference: str) -> float:
    """1 when both are the same but for white space, else 0."""
    return float(answer.split() == reference.split())


def rouge_l(answer: str, reference: str) -> float:
    """Harmonic mean of the shares of both answers that their longest common subsequence of words is."""
    return _harmonic(answer, reference, longest_common_subsequence)


def _harmonic(answer: str, reference: str, shared: Callable[[list[str], list[str]], int]) -> float:
    left, right = words(answer), words(reference)
    return 2 * shared(left, right) / (len(left) + len(right)) if left or right else 1.0


MEASURES: dict[str, Callable[[str, str], float]] = {"f1": token_f1, "exact": exact_match, "rouge-l": rouge_l}

# Chinese and Japanese are written without spaces: there every character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """In lower case and without punctuation, unless the text has nothing else."""
    folded = text.casefold()
    return _WORD.findall(folded) or folded.split()


def longest_common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Its length. One bit per item of ``left``, cleared where the subsequence grows (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for index, item in enumerate(left):
        places[item] = places.get(item, 0) | 1 << index
    full = (1 << len(left)) - 1
    open_bits = full
    for item in right:
        matching = open_bits & places.get(item, 0)
        open_bits = (open_bits + matching | open_bits - matching) & full
    return len(left) - open_bits.bit_count()
