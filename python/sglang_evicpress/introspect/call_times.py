"""CPU time that calls from outside cost the scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Spent:
    count: int = 0
    cpu_s: float = 0.0
    max_cpu_s: float = 0.0
    max_wall_s: float = 0.0


class CallTimes:
    """Per operation: how many calls, and what the dearest cost the calling thread. Not thread-safe."""

    def __init__(self) -> None:
        self._spent: dict[str, _Spent] = {}

    @contextmanager
    def measure(self, op: str) -> Iterator[None]:
        """Count what is done inside, also when it raises."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            spent = self._spent.setdefault(op, _Spent())
            cpu_s = time.thread_time() - cpu_s
            spent.count += 1
            spent.cpu_s += cpu_s
            spent.max_cpu_s = max(spent.max_cpu_s, cpu_s)
            spent.max_wall_s = max(spent.max_wall_s, time.perf_counter() - wall_s)

    def to_json(self) -> dict[str, dict[str, float]]:
        """Milliseconds by operation; ``cpu`` is the thread's own time, ``wall`` has waiting in it."""
        return {
            op: {
                "count": spent.count,
                "cpu_ms": 1e3 * spent.cpu_s,
                "max_cpu_ms": 1e3 * spent.max_cpu_s,
                "max_wall_ms": 1e3 * spent.max_wall_s,
            }
            for op, spent in sorted(self._spent.items())
        }
