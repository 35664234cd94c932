"""Expected reuse of a node: hits that fade with one half-life, kept so that time alone never reorders nodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from sglang_evicpress.policy.regression import weighted_median

START_HALF_LIFE_S = 1.0
"""Before anything is learned: so short that the last use decides, as in LRU."""

HALF_LIFE_PER_GAP = 1.5
"""A learned half-life over the median reuse gap; of 0.5 to 8 the best compromise on three public traces."""

_LEAST_S, _MOST_S = 0.1, 86_400.0
_NUM_GAPS = 512
_LOOKS = (8, 16, 32)  # observations after which the half-life is learned anew, and then
_GAPS_PER_LOOK = 64
_WORTH_A_CHANGE = 1.5
_REBASE_EXPONENT = 500.0  # a double ends at 2**1023: sums of weights stay far below

Restate = Callable[[float, float], float]
"""(weight, last use in seconds) -> the weight in the units of the new epoch and half-life."""


class ReuseClock:
    """Value of a hit now, in the units of a reference epoch.

    A hit at time t counts 2**(-(now - t) / half_life_s) at time now. All nodes share the half-life, so the factor
    2**(now / half_life_s) is common to all of them and is left out: a hit adds ``value_of_hit(t)`` =
    2**((t - epoch_s) / half_life_s) to its node once, and no weight changes until the next hit.
    Weights can be compared with each other at any time; ``faded`` gives the number of hits they stand for.

    With another epoch or half-life all weights are in other units: ``units`` counts those that there were, and
    ``in_present_units`` restates a weight when it is next looked at.

    ``half_life_s`` is in seconds, above 0 (inf: plain counts); None lets it be learned. What is reused within seconds
    by agents is reused within minutes by people, and a half-life far from that either forgets what will come back or
    remembers what is dead; the learned one is ``HALF_LIFE_PER_GAP`` times the median time between two uses, weighted
    by the tokens reused, over the last hits. Reads no clock. Raises ValueError for a half-life that is not above 0.
    """

    def __init__(self, half_life_s: float | None, epoch_s: float = 0.0) -> None:
        if half_life_s is not None and not half_life_s > 0.0:
            raise ValueError(f"half life is {half_life_s!r}: expected seconds above 0")
        if not math.isfinite(epoch_s):
            raise ValueError(f"epoch is {epoch_s!r}: expected finite seconds")
        self.is_learned = half_life_s is None
        self.half_life_s = START_HALF_LIFE_S if half_life_s is None else half_life_s
        self.epoch_s = epoch_s
        self._wanted_s = self.half_life_s
        self._gaps: deque[tuple[float, int]] = deque(maxlen=_NUM_GAPS)
        self._num_observed = 0
        self._restates: list[Restate] = []

    @property
    def units(self) -> int:
        """Number of the units in which hits are counted now."""
        return len(self._restates)

    def in_present_units(self, weight: float, last_use_s: float, units: int) -> float:
        """The weight of a node that was last used at ``last_use_s``, given in earlier units."""
        for restate in self._restates[units:]:
            weight = restate(weight, last_use_s)
        return weight

    def value_of_hit(self, now_s: float) -> float:
        """Weight that a hit at ``now_s`` adds."""
        return float(2.0 ** ((now_s - self.epoch_s) / self.half_life_s))

    def faded(self, weight: float, now_s: float) -> float:
        """The decayed number of hits that ``weight`` stands for at ``now_s``."""
        return weight / self.value_of_hit(now_s)

    def observe_reuse(self, gap_s: float, num_tokens: int) -> None:
        """A request reuses ``num_tokens`` tokens, the last of which were last used ``gap_s`` seconds ago."""
        if not self.is_learned or num_tokens < 1:
            return
        self._gaps.append((max(gap_s, 0.0), num_tokens))
        self._num_observed += 1
        if self._num_observed in _LOOKS or self._num_observed % _GAPS_PER_LOOK == 0:
            wanted = HALF_LIFE_PER_GAP * weighted_median(*zip(*self._gaps, strict=True))
            self._wanted_s = min(max(wanted, _LEAST_S), _MOST_S)

    def is_due(self, now_s: float) -> bool:
        """True if every weight should be in other units: ``rebase`` says how to restate it."""
        ratio = self._wanted_s / self.half_life_s
        if ratio > _WORTH_A_CHANGE or ratio * _WORTH_A_CHANGE < 1.0:
            return True
        return (now_s - self.epoch_s) / self.half_life_s > _REBASE_EXPONENT

    def rebase(self, now_s: float) -> Restate:
        """Move the epoch to ``now_s`` and take the learned half-life; returns how to restate every weight.

        With another half-life a weight stands for the same number of hits at its node's last use as before.
        """
        old_epoch_s, old_half_life_s = self.epoch_s, self.half_life_s
        self.epoch_s, self.half_life_s = now_s, self._wanted_s
        new_half_life_s = self.half_life_s
        factor = float(2.0 ** ((old_epoch_s - now_s) / old_half_life_s))

        def scale(weight: float, last_use_s: float) -> float:
            return weight * factor  # for all: not even rounding reorders them

        def restate(weight: float, last_use_s: float) -> float:
            faded = (last_use_s - now_s) / new_half_life_s
            if faded == -math.inf:
                return 0.0  # and not the difference of two infinities, which is no number
            exponent = faded - (last_use_s - old_epoch_s) / old_half_life_s
            return weight * float(2.0 ** min(exponent, _REBASE_EXPONENT))

        self._restates.append(scale if new_half_life_s == old_half_life_s else restate)
        return self._restates[-1]


def weight_of_new(hit: float, parent_weight: float, num_children: int) -> float:
    """The weight of a node that has just been added below one of ``parent_weight``, which has now ``num_children``.

    Its parent's expected reuse is shared among the children: the next turn of a conversation or an agent goes on from
    its end, so that end is as likely to be used again as what leads there, while one of many questions about a document
    is not. At least one hit, its own; ``hit`` is ``ReuseClock.value_of_hit`` now. 0 children: it is below the root.
    """
    return max(hit, parent_weight / num_children) if num_children else hit
