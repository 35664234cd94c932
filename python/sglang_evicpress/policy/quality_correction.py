"""Loss observed over loss predicted, of answers that were judged."""

from __future__ import annotations

import math

_JUDGED_MEMORY = 64  # answers
_JUDGED_PRIOR = 8.0  # answers that lost what the target allows and were predicted right, to start with
_LEAST, _MOST = 0.2, 10.0
FRESH_S = 600.0
"""Answers judged longer ago than this do not make anything count as better than predicted."""


class QualityCorrection:
    """Factor for predicted losses, learned from judged answers upon lossy prefixes. ``allowed_loss``: what an answer
    may lose, as the answers that it starts with did. Pure."""

    def __init__(self, allowed_loss: float) -> None:
        self._predicted = self._observed = _JUDGED_PRIOR * allowed_loss
        self._judged_s = -math.inf

    def ratio(self, now_s: float) -> float:
        """The factor now: below 1 only where an answer was judged of late."""
        ratio = self._observed / self._predicted if self._predicted > 0.0 else 1.0
        if ratio < 1.0 and now_s - self._judged_s > FRESH_S:
            return 1.0
        return min(max(ratio, _LEAST), _MOST)

    def note_judged(self, predicted: float, observed: float, now_s: float) -> None:
        """An answer was judged. Raises ValueError for a quality that is not a finite number."""
        if not math.isfinite(predicted - observed):
            raise ValueError(f"quality was predicted {predicted!r} and observed {observed!r}: expected finite numbers")
        fade = 1.0 - 1.0 / _JUDGED_MEMORY
        self._predicted = fade * self._predicted + max(0.0, 1.0 - predicted)
        self._observed = fade * self._observed + max(0.0, 1.0 - observed)
        self._judged_s = now_s
