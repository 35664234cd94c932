"""Expected wait of a request for its turn, by Little's formula: those ahead of it / the rate of admission, and a
margin on it, learnt from waits, so that few of those admitted are late."""

from __future__ import annotations

import math

MEMORY_S = 5.0
"""Time constant of the rate, in seconds in which somebody waited. Batches are admitted 0.05 to 1 s apart, so it holds
several; queues worth refusing for are longer than it, so a change is seen before the queue has passed."""

LEAST_ADMITTED = 8
"""So many admissions are remembered however long they took: of long prompts fewer than one may fit in ``MEMORY_S``.
A rate from so many is right to within a third."""

IDLE_S = 30.0
"""After so long in which nobody waited the rate is not known any more: what slowed the server down may be over, and who
is refused by an old rate does not wait, so that a new one would never be learnt."""

LATE_SHARE = 0.05
"""Share of admitted requests that may be later than the limit."""

GAIN = 0.04
"""Step of the margin as a share of the limit: 25 late requests in a row are worth the limit."""

LARGEST = 0.7
"""Largest margin as a share of the limit. Prompts that take longer than the limit by themselves would otherwise close
the queue for everybody."""


class Turns:
    """The rate at which waiting requests are admitted, learnt from scheduler rounds. It has no clock of its own.

    Two exponentially weighted sums, of admissions and of the seconds in which somebody waited for one. Seconds are
    added together with the admission that ended them, so a batch of many does not swing the rate up when it is
    admitted and down until the next. Times with an empty queue say nothing of what the server could do: neither they
    nor whoever is admitted without having waited count.
    """

    def __init__(self) -> None:
        self._admitted = 0.0
        self._busy_s = 0.0
        self._open_s = 0.0  # somebody has waited so long since the last admission
        self._last_batch = 0
        self._waited_s = -math.inf  # when somebody waited last
        self._now_s = -math.inf
        self._batch = 0  # admitted in rounds since the clock last moved,
        self._was_empty = True  # and whether nobody waited after one of them, or the one in which it moved

    def observe(self, now_s: float, num_waiting: int, num_admitted: int) -> None:
        """After each scheduler round: how many wait after it, and how many were admitted in it.

        ``now_s`` is in seconds from any start, and may stand still for rounds. Those are one long round then, which
        says nothing where the queue was empty in between: for how long is not known.
        """
        if num_waiting > 0:
            self._waited_s = max(self._waited_s, now_s)
        if now_s <= self._now_s:
            self._batch += num_admitted
            self._was_empty |= num_waiting == 0
            return
        if not self._was_empty:
            self._open_s += now_s - self._now_s
            num_admitted += self._batch
            if num_admitted > 0:
                # Whoever took the last ones may have had room for more, at least for as many as the time before.
                self._add(num_admitted if num_waiting > 0 else max(num_admitted, self._last_batch))
        if num_admitted > 0 or self._was_empty:
            self._open_s, self._last_batch = 0.0, num_admitted
        self._now_s, self._batch, self._was_empty = now_s, 0, num_waiting == 0

    def forget_idle(self, now_s: float) -> None:
        """Know nothing, as at the start, where nobody has waited for ``IDLE_S``. For who would refuse a request now."""
        if self._was_empty and now_s - self._waited_s > IDLE_S:
            self._admitted = self._busy_s = 0.0

    @property
    def rate(self) -> float | None:
        """Admitted requests per second in which somebody waited. None while it is unknown: before ``LEAST_ADMITTED``
        admissions or ``MEMORY_S`` of waiting with at least one."""
        if self._admitted <= 0.0 or self._busy_s <= 0.0:
            return None
        if self._admitted < LEAST_ADMITTED and self._busy_s + self._open_s < MEMORY_S:
            return None
        # If a batch like the last came now. It is overdue where that is less than before.
        overdue = (self._admitted + max(1, self._last_batch)) / (self._busy_s + self._open_s)
        return min(self._admitted / self._busy_s, overdue)

    def wait_s(self, num_ahead: int) -> float:
        """Expected seconds until a request with ``num_ahead`` ahead of it is admitted; 0 while nothing is known."""
        rate = self.rate
        return 0.0 if rate is None or num_ahead <= 0 else num_ahead / rate

    def _add(self, num_admitted: int) -> None:
        """Admissions and the time that ended with them, after forgetting what lies that far back."""
        kept = math.exp(-self._open_s / MEMORY_S)
        if self._admitted > 0.0:
            kept = max(kept, min(1.0, LEAST_ADMITTED / self._admitted))
        self._admitted = kept * self._admitted + num_admitted
        self._busy_s = kept * self._busy_s + self._open_s


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
