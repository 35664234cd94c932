"""Counts of evictions, and the last of them: a part of ``/evicpress/stats``."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

NUM_LOGGED = 64


class EvictionLog:
    """``counts`` and ``seconds`` by what was done, copying at once included; ``last`` are the last choices."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.seconds = defaultdict[str, float](float)
        self.last: deque[dict[str, object]] = deque(maxlen=NUM_LOGGED)

    def add(self, way: str, seconds: float, **terms: object) -> None:
        """One of two plans was carried out, for what they were predicted to cost."""
        self.counts[way] += 1
        self.seconds[way] += seconds
        self.last.append({"way": way, **terms, "took_s": seconds})

    def describe_evictions(self) -> dict[str, object]:
        return {"counts": dict(self.counts), "seconds": dict(self.seconds), "last": list(self.last)}
