"""Threads that do not end unnoticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sglang_evicpress.error_text import code_path

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0  # before a failed thread goes on; doubled after each further failure
LONGEST_PAUSE_S = 60.0


class WatchedThread:
    """A daemon thread that runs ``target``. When that raises, whatever it is, the failure is logged and counted, and
    ``target`` is called again after a pause: it must be safe to begin anew."""

    def __init__(self, name: str, target: Callable[[], None], *, pause_s: float = FIRST_PAUSE_S) -> None:
        self.name = name
        self._target = target
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._num_failures = 0
        self._last_failure: str | None = None

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """A target that fails after this is not called again; one that runs is not interrupted."""
        self._is_over.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end, at most ``timeout_s``. A thread that was never started has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def describe(self) -> dict[str, object]:
        """For ``/evicpress/stats``. ``state``: new, running, paused (failed, about to begin anew) or ended."""
        state = "running" if self.is_alive() else "new" if self._thread.ident is None else "ended"
        if self._is_paused:
            state = "paused"
        return {
            "name": self.name,
            "state": state,
            "num_failures": self._num_failures,
            "last_failure": self._last_failure,
        }

    _is_paused = False

    def _run(self) -> None:
        pause_s = self._pause_s
        while not self._is_over.is_set():
            try:
                self._target()
            except BaseException as error:  # noqa: BLE001 - SystemExit too would end the thread without a word
                self._num_failures += 1
                self._last_failure = code_path(error)
                logger.error("evicpress: thread %s failed: %s", self.name, self._last_failure)
            else:
                return
            self._is_paused = True
            self._is_over.wait(pause_s)
            self._is_paused = False
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
