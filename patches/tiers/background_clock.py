"""Times of the work in the background: when it is to plan again, and when a request last ran."""

from __future__ import annotations

import time

PLAN_SHARE = 1 / 20  # of the time, for plans in the background
SHARED_PAUSE_S = 0.05  # between plans of several ranks, which must not go by what one of them takes
MOST_DEFERRED_S = 0.05  # by which a plan that is due waits for a first token


class BackgroundClock:
    """``is_dirty``: something has changed that may call for room. ``busy_s``: when a request last ran or waited.
    ``is_full``: other work takes the time of this round, in which no plans are begun."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self.is_dirty = False
        self.busy_s = 0.0
        self._next_plan_s = 0.0
        self._is_urgent = False
        self._round_s = 0.0
        self.is_full = False

    def begin_round(self) -> None:
        """Work between two batches begins, of this and of others."""
        self._round_s = time.perf_counter()

    def spent_s(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self._round_s

    def mark_dirty(self, *, at_once: bool = False) -> None:
        """Something has changed; ``at_once``: somebody waits for room."""
        self.is_dirty = True
        if at_once:
            self._next_plan_s, self._is_urgent = 0.0, True

    def note_busy(self, now_s: float) -> None:
        """A request runs or waits."""
        self.busy_s = now_s

    def begin_plan(self, now_s: float, *, is_idle: bool, delays_token: bool = False) -> bool:
        """True if plans are due: what changes from now on calls for others. ``delays_token``: somebody would wait for
        them for a first token, and they can follow it."""
        is_full, self.is_full = self.is_full, False  # whoever waits within a round may have plans made
        due_s = self._next_plan_s + (MOST_DEFERRED_S if delays_token else 0.0)
        is_due = self.is_dirty and not is_full and (is_idle or now_s >= due_s)
        if is_due:
            self.is_dirty = self._is_urgent = False
        return is_due

    def end_plan(self, begin_s: float) -> None:
        """Plans were made since ``begin_s``: the next ones wait until they take ``PLAN_SHARE`` of the time, unless
        somebody waits for more room since."""
        if not self._is_urgent:
            pause_s = SHARED_PAUSE_S if self._is_shared else (time.monotonic() - begin_s) / PLAN_SHARE
            self._next_plan_s = begin_s + pause_s
