"""The order of a tenant that holds more than it may: everything shrinks before anything leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from sglang_evicpress.core import LowerCopy
from sglang_evicpress.policy.base import DROPPED, Candidate, Step
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

EVERYWHERE = (1 << DROPPED + 1) - 1
"""Every tier below, and the drop."""


class CompressFirstPolicy:
    """The steps of ``weigher``, but those that shrink a node in place, to a quality of ``least_quality`` or more, come
    before those by which one leaves its tier; of each kind the first are those that lose least utility per byte.

    Of one plan the sum of losses is not the least: what may be lost is bounded by quality instead. The weigher may
    be that of all nodes: it works on what it is shown.
    """

    name = "compress-first"
    weighs_quality = True

    def __init__(self, weigher: EvicPressPolicy, least_quality: float = 0.0) -> None:
        self._weigher = weigher
        self._least_quality = least_quality
        self.menu, self.compresses = weigher.menu, weigher.compresses

    def step(
        self, candidate: Candidate, excluded_tiers: int = 0, lower_copies: Sequence[LowerCopy] | None = None
    ) -> Step | None:
        shrink = self._weigher.step(candidate, EVERYWHERE)
        if shrink is not None and shrink.quality >= self._least_quality:
            return shrink._replace(key=_before_zero(shrink.key))
        step = self._weigher.step(candidate, excluded_tiers, lower_copies)
        return None if step is None else step._replace(key=max(0.0, step.key))

    def delay_s(self, candidate: Candidate) -> float:
        return self._weigher.delay_s(candidate)

    def forget_steps(self) -> None:
        """The weigher's are forgotten where it is told of what outdates them."""

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        self._weigher.prepare(candidates)


def _before_zero(key: float) -> float:
    """A number below 0 for each, also for an infinite one, in the same order."""
    return key - 1.0 if key <= 0.0 else min(-1.0 / (1.0 + key), -sys.float_info.min)
