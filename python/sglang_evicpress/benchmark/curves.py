"""Quality against TTFT: the settings of a kind of system as a curve, compared with the curve of another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sglang_evicpress.benchmark.summary import Cell, Summary


@dataclass(frozen=True, slots=True)
class Point:
    """One setting at one rate."""

    system: str
    quality: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The settings of one or more kinds. ``envelope`` are those that no other one beats in both, by quality; between
    two of them it is a straight line, and nowhere does it reach beyond what was measured."""

    points: tuple[Point, ...]

    @property
    def envelope(self) -> list[Point]:
        best: list[Point] = []
        for point in sorted(self.points, key=lambda point: (-point.quality, point.ttft_s)):
            if not best or point.ttft_s < best[-1].ttft_s:
                best.append(point)
        return best[::-1]

    def ttft_at(self, quality: float) -> float | None:
        """Seconds to reach at least this quality; None below the worst and above the best quality measured."""
        return self._at(quality, "quality", "ttft_s")

    def quality_at(self, ttft_s: float) -> float | None:
        """The best that is reached within so many seconds; None below the least and above the largest TTFT measured."""
        return self._at(ttft_s, "ttft_s", "quality")

    def _at(self, value: float, along: str, wanted: str) -> float | None:
        measured = [getattr(point, along) for point in self.points]
        if not measured or not min(measured) <= value <= max(measured):
            return None
        known, found = ([getattr(point, name) for point in self.envelope] for name in (along, wanted))
        return float(np.interp(value, known, found))


@dataclass(frozen=True, slots=True)
class Gap:
    """Two curves at one quality: ``ratio`` is how many times as long the other one takes."""

    quality: float
    ttft_s: float
    other_ttft_s: float

    @property
    def ratio(self) -> float:
        return self.net_ratio(0.0) or float("inf")

    def net_ratio(self, overhead_s: float) -> float | None:
        """The same without a fixed overhead; None where nothing is left of the first one's time."""
        left = self.ttft_s - overhead_s
        return (self.other_ttft_s - overhead_s) / left if left > 0.0 else None


def curve(summary: Summary, kinds: Iterable[str], rate: float, measure: str = "f1_full_cache") -> Curve:
    """Points of the systems of these kinds that answered, in the summary's order."""
    points = []
    for cell in comparable(summary, kinds, rate):
        quality = cell.quality(measure)
        if quality is not None and cell.ttft.mean_s is not None:
            points.append(Point(cell.system, quality, cell.ttft.mean_s))
    return Curve(tuple(points))


def gaps(one: Curve, other: Curve) -> list[Gap]:
    """At every quality that a setting of either has and both reach: between two of these the ratio lies between theirs,
    so that the first one's largest gain and largest loss are among them."""
    found = []
    for quality in sorted({point.quality for point in (*one.points, *other.points)}):
        left, right = one.ttft_at(quality), other.ttft_at(quality)
        if left is not None and right is not None:
            found.append(Gap(quality, left, right))
    return found


def comparable(summary: Summary, kinds: Iterable[str], rate: float) -> list[Cell]:
    """Cells of these kinds with next to no failed or refused requests."""
    wanted = set(kinds)
    return [cell for cell in summary.at(rate) if cell.kind in wanted and cell.is_comparable]


def best_at_quality(
    summary: Summary, kinds: Iterable[str], rate: float, least: float, measure: str = "f1_full_cache"
) -> Cell | None:
    """The system of these kinds with the lowest mean TTFT among those whose quality is ``least`` at least."""
    good = [cell for cell in comparable(summary, kinds, rate) if is_good(cell, least, measure)]
    return min(good, key=lambda cell: cell.ttft.mean_s or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests/s that a system bears. ``is_at_least``: it bears the highest rate measured, and maybe more."""

    system: str
    rps: float
    is_at_least: bool


def capacity(
    summary: Summary, system: str, limit_s: float, *, least: float = 0.8, measure: str = "f1_full_cache"
) -> Capacity | None:
    """Up to where the 95th percentile of TTFT stays within ``limit_s`` and quality at ``least``, on straight lines
    between rates; failed requests count as endless. It ends at the first rate that fails, whatever is above it, and one
    of which quality or TTFT are not known does. None without a rate at which both are.
    """
    last: Cell | None = None
    cells = summary.of(system)
    if all(cell.quality(measure) is None or cell.ttft_p95_of_all_s is None for cell in cells):
        return None
    for cell in cells:
        if cell.ttft_p95_of_all_s is None or cell.ttft_p95_of_all_s > limit_s or not is_good(cell, least, measure):
            return Capacity(system, 0.0 if last is None else _crossing(last, cell, limit_s, least, measure), False)
        last = cell
    return None if last is None else Capacity(system, last.rate, True)


def unloaded_p95(summary: Summary, system: str) -> float | None:
    """Seconds: the 95th percentile of TTFT at rate 0."""
    cell = summary.cell(system, 0.0)
    return None if cell is None else cell.ttft_p95_of_all_s


def _crossing(below: Cell, above: Cell, limit_s: float, least: float, measure: str) -> float:
    """The rate between the two at which the first of the limits is met; the one below where the other's figures are not
    known."""
    rates = [above.rate]
    if above.quality(measure) is None or above.ttft_p95_of_all_s in (None, float("inf")):
        return below.rate
    p95 = (below.ttft_p95_of_all_s or 0.0, above.ttft_p95_of_all_s or 0.0)
    if p95[1] > limit_s:
        rates.append(_between(limit_s, *p95, below.rate, above.rate))
    quality = (below.quality(measure) or 0.0, above.quality(measure) or 0.0)
    if quality[1] < least:
        rates.append(_between(least, *quality, below.rate, above.rate))
    return min(rates)


def is_good(cell: Cell, least: float, measure: str) -> bool:
    """True if the quality is known, and at least that."""
    quality = cell.quality(measure)
    return quality is not None and quality >= least


def _between(x: float, low: float, high: float, at_low: float, at_high: float) -> float:
    """On the straight line through two points."""
    return at_low if low == high else at_low + (at_high - at_low) * (x - low) / (high - low)
