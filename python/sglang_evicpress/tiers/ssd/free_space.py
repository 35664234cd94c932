"""Free space of a folder's file system. It may be full of what others write, and it may not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sglang_evicpress.threads import WatchedThread
from sglang_evicpress.tiers.ssd.deadline import Caller

FRESH_S = 0.05
"""So long an answer holds, less what was taken since: to ask takes longer than to write a small entry."""
_MIN_FREE_BYTES = 64 << 20  # left to others: 1 % of the file system, between these two
_MAX_FREE_BYTES = 4 << 30


class FreeSpace:
    """Asks ``question``, which returns the free bytes and all of them, on a thread of its own. Thread-safe."""

    def __init__(self, question: Callable[[], tuple[int, int]]) -> None:
        self._question = question
        self._caller = Caller("evicpress-ssd-room")
        self._lock = threading.Lock()
        self._answer = 0, 0
        self._asked_s = -FRESH_S
        self._taken = 0  # since it was asked

    @property
    def thread(self) -> WatchedThread:
        """The one that asks."""
        return self._caller.thread

    @property
    def hangs(self) -> bool:
        """True if a question has not been answered in time, and is not yet."""
        return self._caller.hangs

    def take(self, num_bytes: int, reserved: int, seconds: float) -> bool:
        """True if others are left what is theirs when ``num_bytes`` are taken besides the ``reserved`` ones, which may
        not be written yet. Raises TimeoutError when there is no answer within ``seconds``, and OSError."""
        with self._lock:
            if time.monotonic() < self._asked_s + FRESH_S and self._fits(num_bytes, reserved):
                return True
        now = time.monotonic()
        answer = self._caller.call(self._question, seconds)
        with self._lock:
            self._answer, self._asked_s, self._taken = answer, now, 0
            return self._fits(num_bytes, reserved)

    def _fits(self, num_bytes: int, reserved: int) -> bool:
        free, total = self._answer
        if free - self._taken - reserved - num_bytes < max(_MIN_FREE_BYTES, min(total // 100, _MAX_FREE_BYTES)):
            return False
        self._taken += num_bytes
        return True

    def close(self) -> None:
        """End the thread as soon as it is free."""
        self._caller.close()
