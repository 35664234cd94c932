"""Agreement of ranks on what the threads of their tiers have done, and on what time it is.

Rank 0 names the jobs that have ended there, with the stamp that it sends before what it has received. Where there are
any, ranks compare their outcomes in one collective: a job ends when it has on every rank, and has failed if it has on
one. So no rank waits for another's disk, and none goes by its own clock, disk or order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.tiers.jobs import Job
from sglang_evicpress.tiers.shared_jobs import NOT_ENDED, SharedWorkers

STAMP_S = 0.1
"""Rank 0 tells the time so often at least."""

ASK_S = 0.5
"""Between two questions whether every disk works again."""


@dataclass(frozen=True, slots=True)
class News:
    """News of rank 0: its clock, the jobs that have ended there, by their threads' name and number, in that order,
    and whether ranks are to say how their disks are."""

    now_s: float
    ended: tuple[tuple[str, int], ...]
    asks_health: bool


@dataclass(frozen=True, slots=True)
class Health:
    """State of the disk under an SSD folder."""

    is_writable: bool = True
    is_answering: bool = True


class Agreement:
    """``health``: of the worst disk, as ranks have last told each other; ``local_health`` tells that of this rank's.
    ``now_s`` goes on when rank 0 says so."""

    def __init__(self, ranks: Ranks, workers: Mapping[str, SharedWorkers]) -> None:
        self.ranks = ranks
        self.health = Health()
        self.local_health: Callable[[], Health] = Health
        self.num_reductions = 0
        self._workers = workers
        self._now_s = 0.0
        self._ended: tuple[tuple[str, int], ...] = ()
        self._is_asked = False
        self._told_s = self._asked_s = 0.0

    def now_s(self) -> float:
        """Time that rank 0 last told; this rank's own clock once it is alone."""
        return time.monotonic() if self.ranks.is_alone else self._now_s

    @property
    def is_due(self) -> bool:
        """True if rank 0 should tell the time, though nothing else calls for it."""
        return time.monotonic() >= self._told_s + STAMP_S

    def news(self) -> News:
        """For all ranks, on rank 0."""
        now_s = self._told_s = time.monotonic()
        ended = [(name, number) for name, workers in self._workers.items() for number in workers.ended()]
        asks = self.health != Health() or self.local_health() != self.health
        asks = asks and now_s >= self._asked_s + ASK_S
        if asks:
            self._asked_s = now_s
        return News(now_s, tuple(ended), asks)

    def take(self, news: News) -> None:
        """Rank 0's news are here, on every rank between the same two steps."""
        self._now_s = max(self._now_s, news.now_s)
        self._ended = news.ended
        self._is_asked = self._is_asked or news.asks_health

    def meet(self) -> None:
        """Let ranks that all wait learn what rank 0 has to tell."""
        if not self.ranks.is_alone:
            self.take(self.ranks.told_by_first(self.news()))

    def finished(self) -> list[Job]:
        """The jobs whose ``finish`` is due: those of this rank alone, and those that have ended on every rank."""
        if self.ranks.is_alone:
            return [job for workers in self._workers.values() for job in workers.finished()]
        alone = [job for workers in self._workers.values() for job in workers.finished_alone()]
        named, self._ended = self._ended, ()
        if not named and not self._is_asked:
            return alone
        health = self.local_health()
        outcomes = [self._workers[name].outcome(number) for name, number in named]
        lowest = self._lowest(torch.tensor([*outcomes, health.is_writable, health.is_answering]))
        self._is_asked = False
        *agreed, is_writable, is_answering = lowest.tolist()
        self.health = Health(bool(is_writable), bool(is_answering))
        jobs = [
            self._workers[name].take(number, outcome)
            for (name, number), outcome in zip(named, agreed, strict=True)
            if outcome != NOT_ENDED
        ]
        self._agree_on_values(jobs)
        return [*alone, *jobs]

    def _agree_on_values(self, jobs: list[Job]) -> None:
        values = [(job, found) for job in jobs if job.error is None and (found := job.values_to_agree()) is not None]
        if not values:
            return
        self.num_reductions += 1
        highest = self.ranks.highest(torch.cat([found for _, found in values]))
        for (job, _), part in zip(values, highest.split([len(found) for _, found in values]), strict=True):
            job.take_agreed(part)

    def _lowest(self, values: torch.Tensor) -> torch.Tensor:
        self.num_reductions += 1
        return self.ranks.lowest(values)
