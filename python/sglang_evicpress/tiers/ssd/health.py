"""Health of the disk under an SSD folder: it answers or hangs, and writing to it works or pauses."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from sglang_evicpress.tiers.ssd.deadline import Caller, Pulse
from sglang_evicpress.tiers.ssd.os_files import reason_of

logger = logging.getLogger(__name__)

ANSWER_S = 0.5
"""A question about the file system's room is waited for."""
HANG_S = 30.0
"""Something that takes longer on the disk hangs: it is out of use until it comes back."""
FRESH_S = 0.05
"""So long an answer about room holds, less what was taken since: to ask takes longer than to write a small entry."""
_MIN_FREE_BYTES = 64 << 20  # left to others: 1 % of the file system, between these two
_MAX_FREE_BYTES = 4 << 30
_MAX_BACKOFF_S = 60.0


class FreeSpace:
    """Free space of a file system, which may be full of what others write, and may not answer.

    Asks ``question``, which returns the free bytes and all of them, and waits only so long. Thread-safe.
    """

    def __init__(self, question: Callable[[], tuple[int, int]]) -> None:
        self._question = question
        self._caller = Caller()
        self._lock = threading.Lock()
        self._answer = 0, 0
        self._asked_s = -FRESH_S
        self._taken = 0  # since it was asked

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

    def had(self, num_bytes: int) -> bool:
        """True if there was so much besides what is left to others when it was last asked."""
        with self._lock:
            free, total = self._answer
            return free - num_bytes >= _left_to_others(total)

    def _fits(self, num_bytes: int, reserved: int) -> bool:
        free, total = self._answer
        if free - self._taken - reserved - num_bytes < _left_to_others(total):
            return False
        self._taken += num_bytes
        return True


def _left_to_others(total: int) -> int:
    return max(_MIN_FREE_BYTES, min(total // 100, _MAX_FREE_BYTES))


class DiskHealth:
    """What is known of the disk of ``folder``, of which ``free_bytes`` tells the free bytes and all of them.

    Whatever is asked of the disk is asked within a beat of ``pulse``. ``errors`` counts what failed, by reason. After a
    failure to write nothing is written for ``backoff_s``, and longer each time until a write succeeds. Thread-safe.
    """

    def __init__(self, folder: str, free_bytes: Callable[[], tuple[int, int]], backoff_s: float) -> None:
        self.errors: Counter[str] = Counter()
        self.pulse = Pulse()
        self._folder = folder
        self._space = FreeSpace(free_bytes)
        self._backoff_s = backoff_s
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._did_hang = False
        self._lock = threading.Lock()

    @property
    def is_answering(self) -> bool:
        """True if the disk does what it is asked to, or has not been asked for long enough to tell; each time it ceases
        to is counted as "deadline". Takes no lock."""
        is_answering = not self._space.hangs and self.pulse.oldest_s() <= HANG_S
        if is_answering == self._did_hang:
            self._did_hang = not is_answering
            self.errors["deadline"] += not is_answering
            what = "answers again" if is_answering else "does not answer: the tier is out of use until it does"
            logger.warning("SSD folder %s %s", self._folder, what)
        return is_answering

    @property
    def is_writable(self) -> bool:
        """Not while it does not answer, nor for some seconds after a write has failed."""
        return time.monotonic() >= self._retry_at and self.is_answering

    def has_room(self, num_bytes: int, reserved: int) -> bool:
        """True if the file system has ``num_bytes`` besides the ``reserved`` ones, which may not be written yet."""
        try:
            if self._space.take(num_bytes, reserved, ANSWER_S):
                return True
            if not self._space.had(num_bytes):
                raise OSError(errno.ENOSPC, "others have filled the file system")
            return False  # for what is being written
        except OSError as error:
            self.pause(error)
            return False

    def count(self, error: OSError | str) -> None:
        """Count a failure, or its reason."""
        with self._lock:
            self.errors[error if isinstance(error, str) else reason_of(error)] += 1

    def pause(self, error: OSError) -> None:
        """Count a failure to write, and let nothing be written for a while."""
        self.count(error)
        with self._lock:
            now = time.monotonic()
            if now < self._retry_at:
                return
            self._pause_s = min(_MAX_BACKOFF_S, 2 * self._pause_s or self._backoff_s)
            self._retry_at = now + self._pause_s
        logger.warning("writing to SSD folder %s pauses for %g s: %s", self._folder, self._pause_s, error)

    def succeed(self) -> None:
        """A write has succeeded."""
        self._pause_s = 0.0
