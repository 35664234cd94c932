"""Threads of one of several ranks, each of which has jobs of the same numbers: ranks agree on what has ended."""

from __future__ import annotations

import itertools

from sglang_evicpress.tiers.entry.header import REASONS
from sglang_evicpress.tiers.jobs import DOES_NOT_FIT, INTERNAL, IO, NOT_FINITE, Job, Signal, Workers

NOT_ENDED = 0
"""Outcome of a job that goes on."""

ERRORS = (*(reason for reason in REASONS if reason != IO), INTERNAL, IO, NOT_FINITE, DOES_NOT_FIT)
"""By which jobs fail, those first that cost most: of several ranks the first one counts."""

_FINE = len(ERRORS) + 1


def error_of(outcome: int) -> str | None:
    """Error that an outcome stands for."""
    return None if outcome == _FINE else ERRORS[outcome - 1]


class SharedWorkers(Workers):
    """``Workers`` of which ``num_pending`` counts the jobs that all ranks have, and no other."""

    def __init__(self, name: str, num_threads: int, arrival: Signal) -> None:
        self._shared_numbers = itertools.count()
        self._open: dict[int, Job] = {}
        self._ended: dict[int, Job] = {}
        super().__init__(name, num_threads, arrival)

    def submit(self, job: Job) -> None:
        self._count(job)
        self._queue.put((job.priority, next(self._numbers), job))

    def hand_over(self, job: Job) -> None:
        """A job that was run by whoever calls: it is finished when it has ended on every rank."""
        self._count(job)
        self._done.append(job)
        job.has_run.set()
        self._arrival.set()

    def _count(self, job: Job) -> None:
        if not job.is_local:
            job.number = next(self._shared_numbers)
            self._open[job.number] = job
            self.num_pending += 1

    def ended(self) -> list[int]:
        """Numbers of the jobs that have ended here, in that order, until they are taken."""
        self._collect()
        return list(self._ended)

    def finished_alone(self) -> list[Job]:
        """The jobs of this rank alone that have ended."""
        self._collect()
        jobs = [job for job in self._on_device if job.is_local and job.has_ended()]
        self._on_device = [job for job in self._on_device if job not in jobs]
        for job in jobs:
            job.is_finished = True
        return jobs

    def outcome(self, number: int) -> int:
        """End of a job on this rank."""
        self._collect()
        job = self._ended.get(number)
        if job is None:
            return NOT_ENDED
        if job.error is None:
            return _FINE
        return 1 + ERRORS.index(job.error)

    def take(self, number: int, outcome: int) -> Job:
        """The job, which has ended on every rank, and so."""
        job = self._open.pop(number)
        del self._ended[number]
        job.error, job.is_finished = error_of(outcome), True
        self.num_pending -= 1
        return job

    def finished(self) -> list[Job]:
        """All that has ended here, once this rank is alone."""
        self._collect()
        jobs = [self._open.pop(number) for number in self._ended]
        self._ended.clear()
        for job in jobs:
            job.is_finished = True
        self.num_pending -= len(jobs)
        return [*jobs, *self.finished_alone()]

    def _collect(self) -> None:
        while self._done:
            self._on_device.append(self._done.popleft())
        going_on: list[Job] = []
        for job in self._on_device:
            if job.is_local or not job.has_ended():
                going_on.append(job)
            else:
                self._ended[job.number] = job
        self._on_device = going_on
