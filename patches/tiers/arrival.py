"""Wake-up of the scheduler: by a thread of the tiers that has ended a job, or by a message from outside."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Iterable

import zmq


class Arrival:
    """Set by threads that have ended a job. ``wait`` and ``clear`` are for the scheduler's thread alone."""

    def __init__(self) -> None:
        self._counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._counter)
        self._poller, self._jobs = zmq.Poller(), zmq.Poller()
        for poller in (self._poller, self._jobs):
            poller.register(self._counter, zmq.POLLIN)

    def watch(self, sockets: Iterable[object]) -> None:
        """End waits as soon as one of ``sockets`` can be read; what is no socket of ZeroMQ is left out."""
        for socket in sockets:
            if isinstance(socket, zmq.Socket):
                self._poller.register(socket, zmq.POLLIN)

    def set(self) -> None:
        """Wake up who waits, or is to wait; on any thread."""
        os.eventfd_write(self._counter, 1)

    def clear(self) -> None:
        """Let the next wait be for what ends after this."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._counter)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether a thread has ended a job or a socket can be read."""
        return bool(self._poller.poll(math.ceil(1e3 * seconds)))

    def wait_for_job(self, seconds: float) -> bool:
        """Wait at most so long for a thread alone: nobody reads the sockets meanwhile."""
        return bool(self._jobs.poll(math.ceil(1e3 * seconds)))
