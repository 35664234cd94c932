"""Quality expected of a context by forms, from the curves of the profiles that tell of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.policy.quality_curves import Curves


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected quality of a node: ``vector`` that of every form of the menu, 0 where nothing is known of it,
    ``known`` the mask of those of which something is. The mean over ``curves`` that know a form."""

    curves: tuple[Curves, ...]
    vector: Sequence[float]
    known: int

    @classmethod
    def of(cls, curves: Sequence[Curves], forms: Sequence[Form]) -> Expectation:
        known = sum(1 << index for index, form in enumerate(forms) if _is_known(curves, form))
        return cls(tuple(curves), tuple(_mean(curves, form) for form in forms), known)

    def quality(self, form: Form) -> float:
        return _mean(self.curves, form)

    def differs(self, other: Expectation, tolerance: float) -> bool:
        """True if other forms are known, or the quality of one is further off than ``tolerance``."""
        gaps = (abs(mine - its) for mine, its in zip(self.vector, other.vector, strict=True))
        return self.known != other.known or max(gaps) > tolerance


def _is_known(curves: Sequence[Curves], form: Form) -> bool:
    is_stored_exactly = form.is_exact and form != EXACT  # which needs no measurement
    return is_stored_exactly or any(each.knows(form) for each in curves)


def _mean(curves: Sequence[Curves], form: Form) -> float:
    if form.is_exact:
        return 1.0
    qualities = [each.quality(form) for each in curves if each.knows(form)]
    return math.fsum(qualities) / len(qualities) if qualities else 0.0
