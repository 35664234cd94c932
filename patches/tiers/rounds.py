"""Work on the tiers between two steps of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.tiers.jobs import Job


class Wakeup(Protocol):
    """Event that a thread sets which has ended a job."""

    def clear(self) -> None: ...
    def wait(self, seconds: float, /) -> bool: ...
    def wait_for_job(self, seconds: float, /) -> bool: ...


class Threads(Protocol):
    """Threads that work for the tiers."""

    @property
    def arrival(self) -> Wakeup: ...
    def now_s(self) -> float: ...
    def meet(self) -> None: ...
    def finished_jobs(self) -> list[Job]: ...

    @property
    def ranks(self) -> Ranks: ...
    @property
    def has_host(self) -> bool: ...
    @property
    def num_pending_jobs(self) -> int: ...


class Clock(Protocol):
    """Times of the work in the background."""

    is_dirty: bool

    def mark_dirty(self) -> None: ...
    def note_busy(self, now_s: float) -> None: ...
    def begin_plan(self, now_s: float, *, is_idle: bool, delays_token: bool = False) -> bool: ...
    def end_plan(self, begin_s: float) -> None: ...


class IdleWork(Protocol):
    """Work, a step at a time, for rounds in which nothing else is done."""

    @property
    def is_busy(self) -> bool: ...
    def advance(self) -> None: ...


@dataclass(eq=False, repr=False)
class TierRounds:
    """Takes in what the threads have done and calls those who have something to do. Of every round, ``first`` are
    called one after the other, ``keep_room`` where plans are due or else, of an idle one, ``idle``, and ``last``."""

    threads: Threads
    clock: Clock
    idle: Sequence[IdleWork]
    _: KW_ONLY
    first: Sequence[Callable[[], None]]
    keep_room: Callable[[], None]
    last: Callable[[], None]

    def __post_init__(self) -> None:
        self.is_ending = False  # no plan is made any more

    def tick(self, *, is_idle: bool = False, delays_token: bool = False) -> None:
        """``is_idle``: no request runs or waits; ``delays_token``: one waits for its first token, and for nothing but
        this round."""
        if not self.has_tiers:
            return
        self.threads.arrival.clear()
        for begin in self.first:
            begin()
        for job in self.threads.finished_jobs():
            job.finish()
            if self.threads.ranks.is_alone or not job.is_local:  # else other ranks do not plan in this round
                self.clock.mark_dirty()
        if self.is_ending:
            return
        now_s = self.threads.now_s()
        if not is_idle:
            self.clock.note_busy(now_s)
        if self.clock.begin_plan(now_s, is_idle=is_idle, delays_token=delays_token):
            self.keep_room()
            self.clock.end_plan(now_s)
        elif is_idle:
            for work in self.idle:
                work.advance()
        self.last()

    @property
    def has_tiers(self) -> bool:
        """True if there is any tier below the GPU."""
        return self.threads.has_host

    @property
    def has_work(self) -> bool:
        """True if there is more to be done than to wait for requests."""
        has_any = self.clock.is_dirty or self.has_jobs or any(work.is_busy for work in self.idle)
        return has_any and self.has_tiers

    @property
    def has_jobs(self) -> bool:
        """True if threads work, or are about to."""
        return self.threads.num_pending_jobs > 0

    def wait(self, seconds: float) -> None:
        """Until a thread has ended a job or a message has come, for so long at most; where others tell when, they
        wait."""
        if self.threads.ranks.is_first:
            self.threads.arrival.wait(seconds)

    def settle(self, is_settled: Callable[[], bool], seconds: float) -> None:
        """Let the threads work until it is settled or they have nothing to do, at most so long."""
        deadline_s = self.threads.now_s() + seconds
        while self.threads.now_s() < deadline_s and not is_settled() and self.has_jobs:
            self.threads.arrival.wait_for_job(0.01)
            self.threads.meet()
            self.tick()
