"""Margin on an expected wait, learnt from waits, so that few of those admitted are late."""

from __future__ import annotations

LATE_SHARE = 0.05
"""Share of admitted requests that may be later than the limit."""

GAIN = 0.04
"""Step of the margin as a share of the limit: 25 late requests in a row are worth the limit."""

LARGEST = 0.7
"""Largest margin as a share of the limit. Prompts that take longer than the limit by themselves would otherwise close
the queue for everybody."""


class WaitMargin:
    """Seconds to add to an expected wait before it is compared with ``limit_s``.

    An expectation is right on average, so half of those admitted at the limit would be late. The margin follows the
    share of late requests instead of a distribution: adaptive conformal inference (Gibbs and Candes, 2021, section 2,
    equation 2), with the margin itself as the parameter that moves.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.seconds = 0.0

    def observe(self, wait_s: float) -> None:
        """Learn from the time in seconds that an admitted request waited for its first token."""
        step = (1.0 if wait_s > self._limit_s else 0.0) - LATE_SHARE
        self.seconds = min(max(0.0, self.seconds + GAIN * self._limit_s * step), LARGEST * self._limit_s)
