"""Threads that carry out jobs off the scheduler thread: first by rank, then in order of arrival."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque

import torch

from sglang_evicpress.error_text import code_path
from sglang_evicpress.threads import WatchedThread
from sglang_evicpress.tiers.entry.encoding import BadEntry

logger = logging.getLogger(__name__)


class Job(ABC):
    """Work in two parts: ``run`` on a worker thread, then ``finish`` on the scheduler thread, always, also after a
    failure, which ``error`` then names by reason. ``priority``: lower ones are taken first. ``seconds``: what
    ``run`` took by the clock, after which ``has_run`` is set. ``is_finished``: ``finish`` is due or over."""

    priority = 1

    def __init__(self) -> None:
        self.error: str | None = None
        self.has_run = threading.Event()
        self.is_finished = False
        self.seconds = 0.0

    def execute(self) -> None:
        """``run``, with its error and the seconds that it took noted."""
        begin = time.perf_counter()
        self.error = "internal"
        try:
            self.run()
            self.error = None
        except BadEntry as error:
            self.error = error.reason
        except OSError as error:
            self.error = "io"
            logger.warning("evicpress: %s failed: %s", type(self).__name__, error)
        except Exception as error:  # noqa: BLE001 - a failed job is a miss: counted, logged and recomputed
            logger.error("evicpress: %s failed: %s", type(self).__name__, code_path(error))
        finally:
            self.seconds = time.perf_counter() - begin

    @abstractmethod
    def run(self) -> None:
        """The work; may raise BadEntry or OSError."""

    @abstractmethod
    def finish(self) -> None:
        """Take the results over, on the scheduler thread."""

    def has_ended(self) -> bool:
        """True if what ``run``, which is over, has queued on a device is over too; never waits."""
        return True


class Workers:
    """``num_threads`` threads and what they have finished. ``submit``, ``finished`` and ``wait`` are for one thread,
    the scheduler's; ``arrival`` is an event that several groups may share."""

    def __init__(self, name: str, num_threads: int, arrival: threading.Event) -> None:
        self._arrival = arrival
        self._numbers = itertools.count()
        self._queue: list[tuple[int, int, Job]] = []
        self._wake = threading.Condition()
        self._done: deque[Job] = deque()
        self._on_device: list[Job] = []  # their ``run`` is over, what it has queued is not
        self._is_closed = False
        self.num_pending = 0
        self.threads = tuple(WatchedThread(f"evicpress-{name}-{index}", self._work) for index in range(num_threads))
        for thread in self.threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self.num_pending += 1
        with self._wake:
            heapq.heappush(self._queue, (job.priority, next(self._numbers), job))
            self._wake.notify()

    def finished(self) -> list[Job]:
        """The jobs that have ended and whose ``finish`` is due."""
        jobs: list[Job] = []
        going_on: list[Job] = []
        while self._done:
            self._on_device.append(self._done.popleft())
        for job in self._on_device:
            (jobs if job.has_ended() else going_on).append(job)
        self._on_device = going_on
        for job in jobs:
            job.is_finished = True
        self.num_pending -= len(jobs)
        return jobs

    def close(self, deadline_s: float) -> None:
        """Take no job more; wait until ``deadline_s`` (``time.monotonic``) for those that run."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        for thread in self.threads:
            thread.stop()
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the barriers of a parallel copy cost more than they gain
        while True:
            with self._wake:
                while not self._queue and not self._is_closed:
                    self._wake.wait()
                if self._is_closed:
                    return
                job = heapq.heappop(self._queue)[2]
            self._run(job)

    def _run(self, job: Job) -> None:
        """Whatever becomes of the job, it is handed back: a request may wait for it."""
        try:
            job.execute()
        finally:  # also when the thread itself is to end: it is started anew
            self._done.append(job)
            job.has_run.set()
            self._arrival.set()
