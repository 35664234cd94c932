"""Calls of a file system that may never come back, as on a mount whose server is gone."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from sglang_evicpress.tiers.ssd.folder import StoreError

T = TypeVar("T")

SLOWEST_BYTES_PER_S = 10e6
"""Of a transfer, which may take so much longer."""


def _begin(work: Callable[[], T]) -> Future[T]:
    """Do ``work`` on a thread of its own, which a process that ends does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is wanted
            future.set_exception(error)

    threading.Thread(target=run, name="evicpress-ssd-call", daemon=True).start()
    return future


def within(seconds: float, what: str, work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Do ``work`` on a thread of its own and return what it returns. Raises what it raises, and StoreError, which names
    ``what``, when it takes longer; ``undo`` then gets what it returns in the end."""
    future = _begin(work)
    if wait((future,), seconds).done:
        return future.result()
    if undo is not None:
        future.add_done_callback(lambda late: None if late.exception() else undo(late.result()))
    raise StoreError(f"{what} did not answer within {seconds:g} s")


class Caller:
    """Makes short calls, one after the other, and comes back in time from each; while one hangs the next ones fail at
    once. Thread-safe."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._hung: Future[Any] | None = None

    @property
    def hangs(self) -> bool:
        """True if a call was given up and has not come back yet."""
        return self._hung is not None and not self._hung.done()

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """Result of ``work``. Raises TimeoutError after so long, and what ``work`` raises."""
        with self._turn:
            if self.hangs:
                raise TimeoutError(errno.ETIMEDOUT, "an earlier call has not been answered yet")
            future = _begin(work)
            if wait((future,), seconds).done:
                return future.result()
            self._hung = future
            raise TimeoutError(errno.ETIMEDOUT, f"it did not answer within {seconds:g} s")


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
