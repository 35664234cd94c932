"""Memory of a running server, sampled while it works, and how fast it grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import psutil

EVERY_S = 1.0
SCHEDULER = "sglang::scheduler"

Sample = tuple[float, float]
"""Seconds since sampling began, and bytes."""


def slope(samples: Sequence[Sample], warm_up_s: float) -> float:
    """Least squares over what came after ``warm_up_s``, in MB a minute. Raises ValueError for less than two samples."""
    times, sizes = np.array([each for each in samples if each[0] >= warm_up_s]).reshape(-1, 2).T
    if len(times) < 2:
        raise ValueError(f"{len(times)} samples after {warm_up_s:g} s: expected at least two")
    return float(np.polyfit(times / 60.0, sizes / 1e6, 1)[0])


class Memory:
    """Resident bytes of a server: of its scheduler, and of all of its processes."""

    def __init__(self, pid: int) -> None:
        self.scheduler: list[Sample] = []
        self.whole: list[Sample] = []
        self._first = psutil.Process(pid)
        self._begin = time.monotonic()

    def sample(self) -> None:
        """A server that is ending has no sample more."""
        with suppress(psutil.Error):
            processes = (self._first, *self._first.children(recursive=True))
            sizes = {process.pid: int(process.memory_info().rss) for process in processes}
            of_scheduler = [sizes[process.pid] for process in processes if process.name().startswith(SCHEDULER)]
            now_s = time.monotonic() - self._begin
            self.whole.append((now_s, float(sum(sizes.values()))))
            self.scheduler.append((now_s, float(sum(of_scheduler))))


@contextmanager
def sampled(pid: int) -> Iterator[Memory]:
    """Samples until the end of the block."""
    memory, is_over = Memory(pid), threading.Event()

    def sample() -> None:
        while not is_over.wait(EVERY_S):
            memory.sample()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield memory
    finally:
        is_over.set()
        thread.join()
