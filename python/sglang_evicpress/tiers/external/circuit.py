"""Circuit breaker of a store: it is left alone while a call hangs, and for a while after one has failed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.ssd.deadline import Pulse

logger = logging.getLogger(__name__)

HANG_S = 2.0
"""A call that takes longer, besides the time for its bytes, hangs: no other one is made until it comes back."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""After a failure, and after many without a success in between."""


class Circuit:
    """Calls of one store. ``errors`` counts those that failed, by reason; ``num_trips`` how often it was left alone.
    Reads and writes pause each by themselves: a store that is full still answers. Thread-safe."""

    def __init__(self, name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self.errors = Counter[str]()
        self.num_trips = 0
        self._name, self._now_s = name, now_s
        self._pulse = Pulse()
        self._retry_at = {"read": 0.0, "write": 0.0}
        self._pause_s = {"read": 0.0, "write": 0.0}
        self._did_hang = False
        self._lock = threading.Lock()

    @property
    def may_read(self) -> bool:
        return self._may("read")

    @property
    def may_write(self) -> bool:
        return self._may("write")

    @property
    def hangs(self) -> bool:
        """True while a call has not come back for too long."""
        is_hung = self._pulse.oldest_s() > HANG_S
        with self._lock:
            is_news, self._did_hang = is_hung != self._did_hang, is_hung
            self.num_trips += is_news and is_hung
            self.errors["deadline"] += is_news and is_hung
        if is_news:
            what = "does not answer: nothing is asked of it until it does" if is_hung else "answers again"
            logger.warning("evicpress: external store %s %s", self._name, what)
        return is_hung

    @contextmanager
    def call(self, kind: str, num_bytes: int) -> Iterator[None]:
        """A "read" or a "write" of so many bytes goes on within. Raises BadEntry, before it begins, while there is to
        be none; whatever an engine raises but BadEntry pauses all calls of that kind, and is an OSError."""
        if not self._may(kind):
            raise BadEntry("deadline", "the store is left alone")
        try:
            with self._pulse.transfer(num_bytes):
                yield
        except BadEntry:
            raise
        except Exception as error:
            self.fail(kind, f"{type(error).__name__}: {error}")
            raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}") from error
        with self._lock:
            if self._now_s() >= self._retry_at[kind] + self._pause_s[kind]:
                self._pause_s[kind] = 0.0

    def fail(self, kind: str, why: str) -> None:
        """Make no call of that kind for a while, for longer each time until one succeeds as long after: a store that is
        full takes some, and then no more."""
        with self._lock:
            self.errors[f"{kind}_failed"] += 1
            now_s = self._now_s()
            if now_s < self._retry_at[kind]:
                return
            pause_s = min(LONGEST_PAUSE_S, 2.0 * self._pause_s[kind] or FIRST_PAUSE_S)
            self._pause_s[kind], self._retry_at[kind] = pause_s, now_s + pause_s
            self.num_trips += 1
        logger.warning("evicpress: external store %s: a %s failed, none for %g s: %s", self._name, kind, pause_s, why)

    def _may(self, kind: str) -> bool:
        return not self.hangs and self._now_s() >= self._retry_at[kind]
