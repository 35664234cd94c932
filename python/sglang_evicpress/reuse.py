"""Expected reuse of a node: hits that fade with one half-life, kept so that time alone never reorders nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

_REBASE_EXPONENT = 500.0  # a double ends at 2**1023: sums of weights stay far below


@dataclass(slots=True)
class ReuseClock:
    """What one hit is worth now, in the units of a reference epoch.

    A hit at time t counts 2**(-(now - t) / half_life_s) at time now. All nodes share the half-life, so the factor
    2**(now / half_life_s) is common to all of them and is left out: a hit adds ``value_of_hit(t)`` =
    2**((t - epoch_s) / half_life_s) to its node once, and no weight changes until the next hit (DESIGN section 4).
    Weights can be compared with each other at any time; ``faded`` gives the number of hits they stand for.

    ``half_life_s`` is in seconds, above 0 (inf: plain counts). Raises ValueError otherwise.
    """

    half_life_s: float
    epoch_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.half_life_s > 0.0:
            raise ValueError(f"half life is {self.half_life_s!r}: expected seconds above 0")
        if not math.isfinite(self.epoch_s):
            raise ValueError(f"epoch is {self.epoch_s!r}: expected finite seconds")

    def value_of_hit(self, now_s: float) -> float:
        """What a hit at ``now_s`` adds to a weight."""
        return float(2.0 ** ((now_s - self.epoch_s) / self.half_life_s))

    def faded(self, weight: float, now_s: float) -> float:
        """The decayed number of hits that ``weight`` stands for at ``now_s``."""
        return weight / self.value_of_hit(now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether weights grow so large that ``rebase`` should be called and every weight scaled."""
        return (now_s - self.epoch_s) / self.half_life_s > _REBASE_EXPONENT

    def rebase(self, now_s: float) -> float:
        """Move the epoch to ``now_s``; returns the factor to multiply every stored weight with."""
        factor = float(2.0 ** (-(now_s - self.epoch_s) / self.half_life_s))
        self.epoch_s = now_s
        return factor
