"""Budget of writes to an SSD per day."""

from __future__ import annotations

DAY_S = 86_400.0
BURST_S = 3_600.0
"""Unused allowance is kept for this long, so that a quiet hour pays for a burst."""


class WearBudget:
    """A bucket that fills by ``bytes_per_day`` and from which writes are taken; no limit when that is None.

    It starts with ``BURST_S`` worth of writes. Times are seconds of any one monotonic clock.
    """

    def __init__(self, bytes_per_day: float | None, now_s: float) -> None:
        self.bytes_per_day = bytes_per_day
        self._most = 0.0 if bytes_per_day is None else bytes_per_day * BURST_S / DAY_S
        self._left = self._most
        self._filled_s = now_s
        self._began_s = now_s
        self.written_bytes = 0
        self.refused_bytes = 0

    def allows(self, now_s: float) -> bool:
        """True if something may be written now. One write may overdraw a bucket that is not empty: an entry larger
        than an hour's worth would never be written otherwise."""
        if self.bytes_per_day is None:
            return True
        self._left = min(self._most, self._left + (now_s - self._filled_s) * self.bytes_per_day / DAY_S)
        self._filled_s = now_s
        return self._left > 0.0

    def take(self, num_bytes: int) -> None:
        """These bytes are written."""
        self._left -= num_bytes
        self.written_bytes += num_bytes

    def refuse(self, num_bytes: int) -> None:
        """These bytes would have been written, had the budget allowed it."""
        self.refused_bytes += num_bytes

    def describe(self, now_s: float) -> dict[str, object]:
        """The gauge: what was written and refused, and the rate per day so far."""
        elapsed_s = max(now_s - self._began_s, 1.0)
        return {
            "limit_bytes_per_day": self.bytes_per_day,
            "written_bytes": self.written_bytes,
            "refused_bytes": self.refused_bytes,
            "bytes_per_day_so_far": self.written_bytes * DAY_S / elapsed_s,
            "left_bytes": None if self.bytes_per_day is None else self._left,
        }
