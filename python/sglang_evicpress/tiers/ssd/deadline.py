"""Calls of a file system that may never come back, as on a mount whose server is gone."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sglang_evicpress.threads import WatchedThread
from sglang_evicpress.tiers.ssd.folder import StoreError

T = TypeVar("T")

SLOWEST_BYTES_PER_S = 10e6
"""Of a transfer, which may take so much longer."""


class _Call(Generic[T]):
    """One call on another thread, and what came of it."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object] | None) -> None:
        self._work, self._undo = work, undo
        self._lock = threading.Lock()
        self._is_given_up = False
        self.has_ended = threading.Event()
        self.result: list[T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            result = self._work()
        except Exception as error:  # noqa: BLE001 - raised where the result is wanted
            self.error = error
        else:
            with self._lock:
                is_wanted = not self._is_given_up
                if is_wanted:
                    self.result.append(result)
            if not is_wanted and self._undo is not None:
                self._undo(result)
        self.has_ended.set()

    def take(self, seconds: float) -> T:
        """The result. Raises TimeoutError when there is none in time, and what the work raised."""
        self.has_ended.wait(seconds)
        with self._lock:
            if not self.result and not self.has_ended.is_set():
                self._is_given_up = True
                raise TimeoutError(errno.ETIMEDOUT, f"it did not answer within {seconds:g} s")
        if self.error is not None:
            raise self.error
        return self.result[0]


def within(seconds: float, what: str, work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Do ``work`` on a thread of its own and return what it returns. Raises what it raises, and StoreError, which names
    ``what``, when it takes longer; ``undo`` then gets what it returns in the end."""
    call = _Call(work, undo)
    threading.Thread(target=call.run, name="evicpress-ssd-call", daemon=True).start()
    try:
        return call.take(seconds)
    except TimeoutError as error:
        if call.error is error:
            raise  # the work's own
        raise StoreError(f"{what} did not answer within {seconds:g} s") from None


class Caller:
    """Makes short calls on a thread of its own, one after the other, and comes back in time from each; while one hangs
    the next ones fail at once. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._call: _Call[object] | None = None
        self._has_call = threading.Condition()
        self._turn = threading.Lock()
        self.thread = WatchedThread(name, self._run)
        self._has_started = False
        self._hung: _Call[object] | None = None

    @property
    def hangs(self) -> bool:
        """True if a call was given up and has not come back yet."""
        return self._hung is not None and not self._hung.has_ended.is_set()

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """Result of ``work``. Raises TimeoutError after so long, and what ``work`` raises."""
        with self._turn:
            if self.hangs:
                raise TimeoutError(errno.ETIMEDOUT, "an earlier call has not been answered yet")
            call = _Call(work, None)
            with self._has_call:
                self._call = call  # type: ignore[assignment]
                if not self._has_started:
                    self._has_started = True
                    self.thread.start()
                self._has_call.notify()
            try:
                return call.take(seconds)
            except TimeoutError:
                self._hung = call  # type: ignore[assignment]
                raise

    def close(self) -> None:
        """End the thread as soon as it is free."""
        with self._has_call:
            if self._has_started:
                self._call = _Call(_stop, None)
                self._has_call.notify()

    def _run(self) -> None:
        while True:
            with self._has_call:
                while self._call is None:
                    self._has_call.wait()
                call, self._call = self._call, None
            call.run()
            if isinstance(call.error, StopIteration):
                return


def _stop() -> None:
    raise StopIteration


class Pulse:
    """Calls under way and their start times. Thread-safe."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    @contextlib.contextmanager
    def beat(self, spared_s: float = 0.0) -> Iterator[None]:
        """Something goes on within; its first ``spared_s`` do not count."""
        token = object()
        self._since[token] = time.monotonic() + spared_s
        try:
            yield
        finally:
            del self._since[token]

    def transfer(self, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """So many bytes are moved within, which the slowest of disks is given the time for."""
        return self.beat(num_bytes / SLOWEST_BYTES_PER_S)

    def oldest_s(self) -> float:
        """For how long the oldest of it has been going on, 0 when there is nothing."""
        since = list(self._since.values())
        return max(0.0, time.monotonic() - min(since)) if since else 0.0
