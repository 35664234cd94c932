"""A clock and worker threads that go on only when a test says so: what happens when is then the test's choice, and the
same again whenever it chooses the same."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest

from sglang_evicpress.patches.tiers import admin, load, loads, shutdown, ssd_attachment, storage
from sglang_evicpress.patches.tiers.arrival import Arrival
from sglang_evicpress.tiers.jobs import Job, Workers
from sglang_evicpress.tiers.ssd import deadline

TICK_S = 1e-5
"""Step of the clock whenever it is read."""

SHORT_S = 0.02
"""Wait of the product for its threads, which here do only what they are let do: a longer one would be in vain."""


class Clock:
    """Stand-in for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def read(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    monotonic = perf_counter = thread_time = read

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class StepArrival(Arrival):
    """Wake-up by threads that go in steps: a wait is for what ``work`` does meanwhile, or else lets the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[StepWorkers] = []
        self.clock: Clock = storage.time  # type: ignore[assignment]
        self.work: Callable[[], bool] = lambda: False

    def wait(self, seconds: float) -> bool:
        if self.work():
            return True
        self.clock.sleep(seconds)
        return False

    wait_for_job = wait

    def busy(self) -> list[StepWorkers]:
        """Threads that have something to do."""
        return [group for group in self.groups if group.num_waiting]


class StepWorkers(Workers):
    """Workers whose jobs run, on the caller's thread, when they are let."""

    def __init__(self, name: str, num_threads: int, arrival: Any) -> None:
        super().__init__(name, 0, arrival)
        self.name, self.width = name, num_threads
        arrival.groups.append(self)

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    def step(self, number: int = 0) -> None:
        """Run one job; as many as there are threads may be overtaken, so it is the ``number``-th of the first ones."""
        first: list[tuple[float, int, Job | None]] = []
        while len(first) <= number:
            first.append(self._queue.get_nowait())
        job = first.pop()[2]
        for entry in first:
            self._queue.put(entry)
        assert job is not None
        self._run(job)


def _answered(work: Callable[[], Any]) -> Future[Any]:
    """A call of the file system that comes back at once."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - as the product's own
        future.set_exception(error)
    return future


def _modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sglang_evicpress"]


@contextlib.contextmanager
def stepped() -> Iterator[Clock]:
    """Caches that are made within work in steps, by the clock that this gives."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in _modules():
            if getattr(module, "time", None) is time:
                patch.setattr(module, "time", clock)
        patch.setattr(storage, "Workers", StepWorkers)
        patch.setattr(storage, "Arrival", StepArrival)
        patch.setattr(deadline, "_begin", _answered)
        patch.setattr(admin, "MOVE_WAIT_S", SHORT_S)
        patch.setattr(ssd_attachment, "SETTLE_S", SHORT_S)
        patch.setattr(shutdown, "CLOSE_S", 1.0 + SHORT_S)
        patch.setattr(load, "LAYER_DEADLINE_S", 0.0)
        patch.setattr(loads, "END_S", 0.0)
        yield clock
