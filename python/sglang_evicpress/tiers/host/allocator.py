"""Extent allocator of an arena: it knows addresses only and touches no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

GRANULE = 4096
"""Runs begin and end at multiples of this, as unbuffered file IO wants it."""
MAX_RUNS = 128
"""Runs an entry may be in: with 64, an arena that is always full loses up to a tenth of itself to large entries."""


class Run(NamedTuple):
    """The bytes [begin, begin + num_bytes) of an arena. A named tuple: making one is a good part of an allocation."""

    begin: int
    num_bytes: int


class Extents:
    """Free runs, joined with their neighbours, by address and by size. For one thread at a time.

    ``num_bytes`` is rounded down to a multiple of ``granule``; an allocation is rounded up to one.
    """

    __slots__ = ("_by_end", "_by_size", "_free", "_used", "granule", "max_runs", "num_bytes", "used_bytes")

    def __init__(self, num_bytes: int, granule: int = GRANULE, max_runs: int = MAX_RUNS) -> None:
        if granule < 1 or max_runs < 1:
            raise ValueError(f"granule {granule} and max_runs {max_runs} must both be at least 1")
        if num_bytes < granule:
            raise ValueError(f"{num_bytes} bytes are less than one granule of {granule}")
        self.granule = granule
        self.max_runs = max_runs
        self.num_bytes = num_bytes - num_bytes % granule
        self.used_bytes = 0
        self._used: dict[int, int] = {}  # begin -> num_bytes of every run handed out
        self._free = {0: self.num_bytes}  # begin -> num_bytes
        self._by_end = {self.num_bytes: 0}  # end -> begin of the same free runs
        self._by_size = [(self.num_bytes, 0)]  # the same, sorted

    @property
    def free_bytes(self) -> int:
        return self.num_bytes - self.used_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free run, 0 when full."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that the next allocation could not use, for it takes at most ``max_runs`` runs."""
        free = self.free_bytes
        return 1.0 - self._reachable() / free if free else 0.0

    def grow(self, num_bytes: int) -> None:
        """Have so many bytes in all, rounded down to a multiple of ``granule``. Raises ValueError for less than now."""
        begin, end = self.num_bytes, num_bytes - num_bytes % self.granule
        if end < begin:
            raise ValueError(f"{begin} bytes cannot grow to {num_bytes}")
        if end > begin:
            self.num_bytes = end
            self._add(begin, end)

    def alloc(self, num_bytes: int) -> tuple[Run, ...] | None:
        """The free run that fits best; without one the largest, the rest where it fits best; None if it does not fit.

        Raises ValueError for less than 1 byte.
        """
        if num_bytes < 1:
            raise ValueError(f"an allocation of {num_bytes} bytes: at least 1 is needed")
        need = num_bytes + -num_bytes % self.granule
        by_size = self._by_size
        position = bisect_left(by_size, (need, 0))
        if position < len(by_size):
            return (self._take(position, need),)
        if need > self.free_bytes or need > self._reachable():
            return None
        runs = []
        while need:
            position = min(bisect_left(by_size, (need, 0)), len(by_size) - 1)
            run = self._take(position, min(need, by_size[position][0]))
            runs.append(run)
            need -= run.num_bytes
        return tuple(runs)

    def free(self, runs: Sequence[Run]) -> None:
        """Give runs of ``alloc`` back, all or some of an allocation's.

        Raises ValueError, and changes nothing, when one was not handed out, is already free or comes twice.
        """
        used = self._used
        for begin, num_bytes in runs:
            if used.get(begin) != num_bytes:
                raise ValueError(
                    f"the run of {num_bytes} bytes at {begin} is not in use: freed twice or never handed out"
                )
        if len(runs) > 1 and len({begin for begin, _ in runs}) != len(runs):
            raise ValueError(f"a run comes twice among the {len(runs)} to be freed")
        for begin, num_bytes in runs:
            del used[begin]
            self.used_bytes -= num_bytes
            self._add(begin, begin + num_bytes)

    def _add(self, begin: int, end: int) -> None:
        """Have the bytes [begin, end) free, in one run with free neighbours."""
        free, by_end, by_size = self._free, self._by_end, self._by_size
        before = by_end.pop(begin, None)
        if before is not None:
            del by_size[bisect_left(by_size, (free[before], before))]
            begin = before
        after = free.pop(end, None)
        if after is not None:
            del by_size[bisect_left(by_size, (after, end))]
            end += after
        free[begin] = end - begin
        by_end[end] = begin
        insort(by_size, (end - begin, begin))

    def _take(self, position: int, need: int) -> Run:
        """Hand out the first ``need`` bytes of a free run."""
        size, begin = self._by_size.pop(position)
        del self._free[begin]
        if size > need:
            rest = begin + need
            self._free[rest] = size - need
            self._by_end[begin + size] = rest
            insort(self._by_size, (size - need, rest))
        else:
            del self._by_end[begin + size]
        self._used[begin] = need
        self.used_bytes += need
        return Run(begin, need)

    def _reachable(self) -> int:
        """Bytes of the ``max_runs`` largest free runs."""
        return sum(size for size, _ in self._by_size[-self.max_runs :])
