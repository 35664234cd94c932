"""Jobs on threads: their order, what becomes of failures, and how they end."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_evicpress.tiers.entry.header import BadEntry
from sglang_evicpress.tiers.jobs import Job, Workers
from sglang_evicpress.tiers.ssd.tier import Reclaim

PATIENCE_S = 30.0


class Noted(Job):
    """Notes on which thread its parts ran; ``work`` is called in between."""

    def __init__(self, name: str = "", priority: int = 1, work: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.name, self.priority, self.work = name, priority, work
        self.ran_on: str | None = None

    def run(self) -> None:
        self.ran_on = threading.current_thread().name
        self.work()

    def finish(self) -> None:
        pass


@pytest.fixture
def make_workers() -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def make(name: str = "test", num_threads: int = 1, arrival: threading.Event | None = None) -> Workers:
        made.append(Workers(name, num_threads, arrival or threading.Event()))
        return made[-1]

    yield make
    for workers in made:
        workers.close(time.monotonic() + PATIENCE_S)


def finished(workers: Workers, count: int) -> list[Job]:
    """The next ``count`` jobs, in the order in which they ended."""
    found: list[Job] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline
        found += workers.finished()
        time.sleep(0.001)
    return found


def hold_up(workers: Workers) -> threading.Event:
    """A job that occupies a thread until the event is set."""
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)

    workers.submit(Noted("first", work=work))
    assert has_begun.wait(PATIENCE_S)
    return may_end


def test_lower_priorities_go_first_and_equal_ones_in_order_of_arrival(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    may_end = hold_up(workers)
    for name, priority in (("a", 2), ("b", 1), ("c", 0), ("d", 1), ("e", 0), ("f", 2)):
        workers.submit(Noted(name, priority))
    may_end.set()
    assert [job.name for job in finished(workers, 7)] == ["first", "c", "e", "b", "d", "a", "f"]


def test_writes_go_before_giving_bytes_back() -> None:
    assert Reclaim.priority > Job.priority


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadEntry("checksum", "a bit was flipped"), "checksum"),
        (BadEntry("length"), "length"),
        (OSError(errno.EIO, "broken"), "io"),
        (FileNotFoundError(), "io"),
        (KeyError("a mistake"), "internal"),
        (AssertionError(), "internal"),
    ],
)
def test_a_failure_is_a_reason_and_the_thread_goes_on(
    make_workers: Callable[..., Workers], error: Exception, reason: str
) -> None:
    def fail() -> None:
        raise error

    workers = make_workers()
    workers.submit(Noted(work=fail))
    workers.submit(Noted())
    bad, good = finished(workers, 2)
    assert (bad.error, good.error) == (reason, None)


def test_a_job_is_pending_until_it_was_fetched(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    may_end = hold_up(workers)
    job = Noted(work=lambda: time.sleep(0.01))
    workers.submit(job)
    assert workers.num_pending == 2 and workers.finished() == [] and not job.is_finished and not job.has_run.is_set()
    may_end.set()
    assert job.has_run.wait(PATIENCE_S)
    assert workers.num_pending == 2 and not job.is_finished
    assert finished(workers, 2)[1] is job
    assert workers.num_pending == 0 and job.is_finished and job.ran_on == "evicpress-test-0"
    assert job.seconds >= 0.01


def test_a_job_is_finished_when_it_has_ended_on_its_device(make_workers: Callable[..., Workers]) -> None:
    has_ended = []

    class Queued(Noted):
        def has_ended(self) -> bool:
            return bool(has_ended)

    workers = make_workers()
    queued, other = Queued("queued"), Noted("other")
    workers.submit(queued)
    workers.submit(other)
    assert other.has_run.wait(PATIENCE_S) and queued.has_run.is_set()
    assert workers.finished() == [other] and workers.finished() == []
    assert workers.num_pending == 1 and not queued.is_finished
    has_ended.append(True)
    assert workers.finished() == [queued] and workers.num_pending == 0 and queued.is_finished


def test_groups_share_what_says_that_something_has_arrived(make_workers: Callable[..., Workers]) -> None:
    arrival = threading.Event()
    groups = [make_workers(name, 1, arrival) for name in ("one", "two")]
    for workers in groups:
        arrival.clear()
        workers.submit(Noted())
        assert arrival.wait(PATIENCE_S)
        assert len(finished(workers, 1)) == 1


def test_every_job_of_many_threads_ends_once(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers(num_threads=4)
    jobs = [Noted(str(index), priority=index % 3) for index in range(300)]
    for job in jobs:
        workers.submit(job)
    found = finished(workers, 300)
    assert {id(job) for job in found} == {id(job) for job in jobs} and len(found) == 300
    assert workers.num_pending == 0


def test_close_lets_the_running_job_end_and_begins_no_other(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    may_end = hold_up(workers)
    left = Noted("left")
    workers.submit(left)
    threading.Timer(0.02, may_end.set).start()
    workers.close(time.monotonic() + PATIENCE_S)
    assert [job.name for job in workers.finished()] == ["first"]
    assert left.ran_on is None and not any(thread.is_alive() for thread in workers.threads)


def test_close_waits_no_longer_than_its_deadline(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    may_end = hold_up(workers)
    workers.close(time.monotonic() + 0.05)
    workers.close(time.monotonic() - 1.0)  # one that has passed
    assert workers.threads[0].is_alive()
    may_end.set()
