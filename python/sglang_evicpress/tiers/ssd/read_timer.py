"""Timer of disk reads: those that overlap share the disk, so they are measured together."""

from __future__ import annotations

import threading

MOST_TOGETHER = 16
"""Reads that are measured together at most, where there is always another one."""


class ReadTimer:
    """Sums up reads from the first that begins while there is none to the last that ends. Thread-safe.

    A small read that waits behind a large one would otherwise be seen to take as long as that, and a law fitted to
    such figures says that every read takes long, whatever its size.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = self._num_ended = self._num_bytes = 0
        self._begin_s = 0.0

    def begin(self, now_s: float) -> None:
        """A read begins."""
        with self._lock:
            if self._num_running == 0:
                self._start(now_s)
            self._num_running += 1

    def end(self, now_s: float, num_bytes: int) -> tuple[int, float] | None:
        """A read of ``num_bytes`` ends, 0 for one that failed: the bytes and seconds of all that were measured with it,
        if it was the last of them."""
        with self._lock:
            self._num_running -= 1
            self._num_ended += 1
            self._num_bytes += num_bytes
            if self._num_running > 0 and self._num_ended < MOST_TOGETHER:
                return None
            period = self._num_bytes, now_s - self._begin_s
            self._start(now_s)
            return period

    def _start(self, now_s: float) -> None:
        self._begin_s, self._num_ended, self._num_bytes = now_s, 0, 0
