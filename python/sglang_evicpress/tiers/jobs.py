"""Threads that carry out jobs off the scheduler thread: first by rank, then in order of arrival."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from queue import PriorityQueue
from typing import Protocol

import torch

from sglang_evicpress.codec import DoesNotFitError, NotFiniteError
from sglang_evicpress.error_text import code_path
from sglang_evicpress.threads import WatchedThread
from sglang_evicpress.tiers.entry.header import BadEntry

logger = logging.getLogger(__name__)

NOT_FINITE = "not_finite"
"""Error of a job that was to encode NaN or Inf."""

INTERNAL, IO = "internal", "io"
"""Errors of a job that raised what it should not, and of one that the system failed."""

DOES_NOT_FIT = "does_not_fit"
"""Error of a job that was to encode what its codec has no room for."""


class Job(ABC):
    """Work in two parts: ``run`` on a worker thread, then ``finish`` on the scheduler thread, always, also after a
    failure, which ``error`` then names by reason. ``priority``: lower ones are taken first. ``seconds``: what
    ``run`` took by the clock, after which ``has_run`` is set. ``is_finished``: ``finish`` is due or over. ``number``:
    the same on every rank."""

    priority = 1
    is_local = False
    """True if it is of this rank alone: nothing that others must know of comes of it."""

    def __init__(self) -> None:
        self.number = 0
        self.error: str | None = None
        self.has_run = threading.Event()
        self.is_finished = False
        self.seconds = 0.0

    def execute(self) -> None:
        """``run``, with its error and the seconds that it took noted."""
        begin = time.perf_counter()
        self.error = INTERNAL
        try:
            self.run()
            self.error = None
        except BadEntry as error:
            self.error = error.reason
        except NotFiniteError:
            self.error = NOT_FINITE
        except DoesNotFitError:
            self.error = DOES_NOT_FIT
        except OSError as error:
            self.error = IO
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

    def values_to_agree(self) -> torch.Tensor | None:
        """Of a job that went well on every rank, what ranks agree on by the highest, int64 of a size that is the same
        on all; None for nothing."""
        return None

    def take_agreed(self, values: torch.Tensor) -> None:  # noqa: B027 - most agree on nothing
        """These are the highest of all ranks."""


class Signal(Protocol):
    """Wakes up who takes over what jobs have brought."""

    def set(self) -> None: ...


class Workers:
    """``num_threads`` threads and what they have finished. ``submit``, ``finished`` and ``wait`` are for one thread,
    the scheduler's; ``arrival`` may be shared by several groups."""

    def __init__(self, name: str, num_threads: int, arrival: Signal) -> None:
        self._arrival = arrival
        self._numbers = itertools.count()
        self._queue: PriorityQueue[tuple[float, int, Job | None]] = PriorityQueue()
        self._done: deque[Job] = deque()
        self._on_device: list[Job] = []  # their ``run`` is over, what it has queued is not
        self.num_pending = 0
        self.threads = tuple(WatchedThread(f"evicpress-{name}-{index}", self._work) for index in range(num_threads))
        for thread in self.threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self.num_pending += 1
        self._queue.put((job.priority, next(self._numbers), job))

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
        for thread in self.threads:
            thread.stop()
            self._queue.put((-math.inf, next(self._numbers), None))
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the barriers of a parallel copy cost more than they gain
        while (job := self._queue.get()[2]) is not None:
            self._run(job)

    def _run(self, job: Job) -> None:
        """Whatever becomes of the job, it is handed back: a request may wait for it."""
        try:
            job.execute()
        finally:  # also when the thread itself is to end: it is started anew
            self._done.append(job)
            job.has_run.set()
            self._arrival.set()
