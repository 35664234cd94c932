"""Promises judged by the runs of one setting under load: pure functions of its repetitions.

EvicPress is judged at the alpha that the config names beforehand, as the reference of its load; where a quality is
asked for, at the best of its alphas, as the fixed presses are at the best of theirs. A fixed press compares where its
F1 is at most 0.01 below: of those the one with the lowest mean TTFT, and exact LRU where there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evicbench.load.repetitions import REFUSING, Repetition, Setting, repetitions_of
from evicbench.report import Line
from sglang_evicpress.benchmark.curves import capacity, unloaded_p95
from sglang_evicpress.benchmark.load import UNLOADED
from sglang_evicpress.benchmark.load_tables import rate_name
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import NOT_WORTH, Cell, Summary

LEAST_RATIO = 1.3
"""How many times lower mean TTFT is, and how many times more requests/s, than with the best fixed press."""

LEAST_OVER_EXACT = 2.5
F1_TOLERANCE = 0.01
IN_FLIGHT = 0.01
"""Of the answers: what is on its way when arrivals end, and may be answered just before or just after."""

MOST_FALL = 0.05
MOST_RECOMPUTED = 0.01
LEAST_F1 = 0.97
MOST_OVER_FULL_CACHE = 1.5

_NO_FOLDER = Results(Path(), {}, (), {})
"""A summary needs one; only its cells are read."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The repetitions of a setting. A rate is told by how many times saturation it is; 0 is one client."""

    setting: Setting
    repetitions: tuple[Repetition, ...]

    @classmethod
    def of(cls, results: Results) -> Grid:
        """Grid of a folder. Raises ValueError as ``Setting.of`` does."""
        return cls(Setting.of(results), tuple(repetitions_of(results)))

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def ours(self) -> str:
        """The system that is judged."""
        return self.setting.ours

    def rates(self, most: float = math.inf) -> list[float]:
        """Multiples of saturation that were planned, up to ``most``."""
        planned = {multiple for repetition in self.repetitions for multiple in repetition.multiples.values()}
        return sorted(multiple for multiple in planned if multiple <= most)

    def systems(self, *kinds: str) -> list[str]:
        return [system for system, kind in self.setting.kinds.items() if kind in kinds]

    def rival(self, repetition: Repetition, one: Cell) -> Cell | None:
        """Run that one of ours is compared with: at its rate, in its repetition."""
        f1 = self.setting.f1
        found = [run for run in repetition.cells if run.rate == one.rate]
        least = (one.quality(f1) or math.inf) - F1_TOLERANCE
        good = [run for run in found if run.kind == "fixed" and (run.quality(f1) or 0.0) >= least]
        rivals = good or [run for run in found if run.kind == "tiers-lru"]
        return min(
            (run for run in rivals if run.ttft.mean_s is not None), key=lambda run: run.ttft.mean_s or 0.0, default=None
        )

    def rate(self, multiple: float) -> str:
        if multiple == 0.0:
            return "one client"
        rates = dict.fromkeys(each.rates[multiple] for each in self.repetitions if multiple in each.rates)
        return f"{', '.join(f'{rate:g}' for rate in rates)}/s, {multiple:g} x saturation"


def targets(grid: Grid) -> Iterator[Line]:
    """Every line of one setting; where servers refuse what would wait too long, only the one about goodput."""
    if grid.setting.refuses:
        yield goodput(grid)
        return
    yield from against_fixed(grid)
    yield from no_collapse(grid)
    yield from recomputed(grid)
    yield from requests_per_second(grid)
    yield near_the_full_cache(grid)
    yield one_client(grid)


# ---- beside the best fixed press


def against_fixed(grid: Grid) -> Iterator[Line]:
    """Three lines: at every rate up to saturation, the median of what every repetition has."""
    of = "that of the best fixed press + LRU of at least its F1 - 0.01"
    yield _compared(
        grid,
        f"{grid.name}: mean TTFT of {grid.ours}, how many times lower than {of}, at every rate up to saturation",
        f">= {LEAST_RATIO:g}x, median of the repetitions",
        lambda one, other: _over(other.ttft.mean_s, one.ttft.mean_s),
        lambda ratio: ratio >= LEAST_RATIO,
    )
    yield _compared(
        grid,
        f"{grid.name}: p95 TTFT of {grid.ours} over {of}, at every rate up to saturation",
        "<= 1, median of the repetitions",
        lambda one, other: _over(one.ttft.p95_s, other.ttft.p95_s),
        lambda ratio: ratio <= 1.0,
    )
    yield _compared(
        grid,
        f"{grid.name}: answers/s of {grid.ours} over {of}, at every rate up to saturation",
        f">= {1 - IN_FLIGHT:g} (less 1 % for what is in flight when arrivals end), median of the repetitions",
        lambda one, other: _over(one.completed_rps, other.completed_rps),
        lambda ratio: ratio >= 1.0 - IN_FLIGHT,
    )


def _compared(
    grid: Grid,
    what: str,
    target: str,
    ratio: Callable[[Cell, Cell], float | None],
    holds: Callable[[float], bool],
) -> Line:
    told, ok = [], bool(grid.rates(1.0)) and bool(grid.repetitions)
    for rate in grid.rates(1.0):
        ratios, names = list[float](), set[str]()
        for number, repetition in enumerate(grid.repetitions, 1):
            one = repetition.at(grid.ours, rate)
            other = None if one is None else grid.rival(repetition, one)
            found = None if one is None or other is None else ratio(one, other)
            if other is None or found is None:
                told.append(f"{grid.rate(rate)}: repetition {number} was not measured")
                ok = False
                continue
            names.add(other.system)
            ratios.append(found)
        if ratios:
            ok = ok and holds(statistics.median(ratios))
            told.append(
                f"{grid.rate(rate)}: {statistics.median(ratios):.2f}x ({_listed(ratios)}; {', '.join(sorted(names))})"
            )
    return Line(what, target, "; ".join(told) or "nothing was measured", ok)


# ---- no collapse


def no_collapse(grid: Grid) -> Iterator[Line]:
    """Answers/s at every rate beside the most at any lower one."""
    ours, fixed = grid.systems("evicpress"), grid.systems("fixed")
    yield _falls(grid, "answers/s of evicpress", ours, lambda run: run.completed_rps)
    yield _falls(grid, "answers/s of fixed presses on our tiers", fixed, lambda run: run.completed_rps)


def goodput(grid: Grid) -> Line:
    systems = grid.systems("evicpress", "fixed")
    return _falls(grid, f"goodput with {REFUSING}", systems, lambda run: run.goodput_rps)


def _falls(grid: Grid, what: str, systems: Sequence[str], value: Callable[[Cell], float | None]) -> Line:
    target = f"falls by at most {MOST_FALL:.0%} up to 2x saturation, median of the repetitions"
    told, ok = [], bool(systems)
    for system in systems:
        found = [_fall(repetition, system, grid.rates(2.0), value) for repetition in grid.repetitions]
        falls = [fall for fall in found if fall is not None]
        if not falls or len(falls) < len(found):
            told.append(f"{system} was not measured at every rate")
            ok = False
            continue
        middle = statistics.median(share for share, _ in falls)
        told.append(f"{system} {middle - 1:+.1%} ({'; '.join(rates for _, rates in falls)})")
        ok = ok and middle >= 1.0 - MOST_FALL
    return Line(f"{grid.name}: {what}", target, "; ".join(told) or "none ran", ok)


def _fall(
    repetition: Repetition, system: str, offered: Sequence[float], value: Callable[[Cell], float | None]
) -> tuple[float, str] | None:
    """The least of any rate over the most of that rate and those below, and all of them in words; None where one is
    not known."""
    runs = (repetition.at(system, rate) for rate in offered)
    known = [found for run in runs if run is not None and (found := value(run)) is not None]
    if len(known) < max(2, len(offered)):
        return None
    least = min(_over(rate, max(known[: place + 1])) or 0.0 for place, rate in enumerate(known))
    return least, ", ".join(f"{rate:.1f}" for rate in known)


# ---- what is computed anew


def recomputed(grid: Grid) -> Iterator[Line]:
    """Two lines: the worst of all rates, repetitions and alphas."""
    target = f"<= {MOST_RECOMPUTED:.0%} of prompt tokens at every rate"
    held = _worst(grid, lambda run: run.work.recomputed)
    not_worth = _worst(grid, lambda run: run.work.computed_for(NOT_WORTH))
    more = f"; not worth loading, at most {not_worth[1]}" if not_worth is not None else ""
    yield _share_line(
        f"{grid.name}: recomputed by evicpress although held below, not counting not_worth", target, held, more
    )
    dropped = _worst(grid, lambda run: run.work.computed_for("dropped"))
    yield _share_line(
        f"{grid.name}: recomputed by evicpress because dropped while a lower tier had room", target, dropped
    )


def _worst(grid: Grid, value: Callable[[Cell], float | None]) -> tuple[float, str] | None:
    """Largest of all runs of EvicPress, with the run in words; None where some run does not say."""
    names = grid.systems("evicpress")
    runs = [
        (repetition, number, run)
        for number, repetition in enumerate(grid.repetitions, 1)
        for run in repetition.cells
        if run.system in names
    ]
    known = [(share, *each) for each in runs if (share := value(each[-1])) is not None]
    if not known or len(known) < len(runs):
        return None
    share, repetition, number, run = max(known, key=lambda each: each[0])
    seconds = run.work.not_worth_s or {}
    told = f"{share:.2%} ({run.system}, {rate_name(run.rate, repetition.multiples)}, repetition {number}"
    if seconds:
        told += "; not worth it: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return share, told + ")"


def _share_line(what: str, target: str, found: tuple[float, str] | None, more: str = "") -> Line:
    if found is None:
        return Line(what, target, "the server does not say why tokens were computed", False)
    return Line(what, target, f"at most {found[1]}{more}", found[0] <= MOST_RECOMPUTED)


# ---- requests/s


def requests_per_second(grid: Grid) -> Iterator[Line]:
    """Two lines; on straight lines between rates, up to the first at which a limit is not kept."""
    what = f"{grid.name}: requests/s at TTFT p95 <= 2x its own with one client and F1 >= {LEAST_F1:g}"
    for kind, least, name in (
        ("tiers-lru", LEAST_OVER_EXACT, "exact LRU over the same tiers"),
        ("fixed", LEAST_RATIO, "the best fixed press + LRU"),
    ):
        told, held = [], 0
        for repetition in grid.repetitions:
            ours, theirs = _most(grid, repetition, "evicpress"), _most(grid, repetition, kind)
            held += ours[0] > 0 and ours[0] >= least * theirs[0]
            ratio = f"{ours[0] / theirs[0]:.2f}x" if theirs[0] else "theirs is none"
            told.append(f"{ratio} ({ours[1]}; {theirs[1]})")
        needed = math.ceil(2 * len(grid.repetitions) / 3)
        yield Line(
            f"{what}, beside {name}",
            f">= {least:g}x in {needed} of {len(grid.repetitions)} repetitions",
            "; ".join(told) or "nothing was measured",
            bool(grid.repetitions) and held >= needed,
        )


def _most(grid: Grid, repetition: Repetition, kind: str) -> tuple[float, str]:
    """The most that a system of the kind bears, and in words."""
    best, told, summary = 0.0, f"{kind} 0", Summary(_NO_FOLDER, None, None, repetition.cells)
    for system in grid.systems(kind):
        limit_s = unloaded_p95(summary, system)
        if limit_s is None:
            continue
        found = capacity(summary, system, UNLOADED * limit_s, least=LEAST_F1, measure=grid.setting.f1)
        if found is not None and found.rps > best:
            best, told = found.rps, f"{system} {'>= ' if found.is_at_least else ''}{found.rps:.2f}"
    return best, told


# ---- beside infinite memory, and with one client


def near_the_full_cache(grid: Grid) -> Line:
    what = f"{grid.name}: p95 TTFT of {grid.ours} at half of saturation"
    tier_s = grid.setting.load_s
    target = (
        f"<= {MOST_OVER_FULL_CACHE:g}x that of full-cache+attention at the same rate + {1e3 * tier_s:.0f} ms, the "
        f"SSD's time for "
        "a context of mean length; median of the repetitions"
    )
    parts, told = [], []
    for number, repetition in enumerate(grid.repetitions if 0.5 in grid.rates() else (), 1):
        one, full_cache = (repetition.at(name, 0.5) for name in (grid.ours, "full-cache+attention"))
        if one is None or full_cache is None or one.ttft.p95_s is None or full_cache.ttft.p95_s is None:
            return Line(what, target, f"repetition {number} was not measured with both", False)
        parts.append(one.ttft.p95_s / (MOST_OVER_FULL_CACHE * full_cache.ttft.p95_s + tier_s))
        told.append(f"{1e3 * one.ttft.p95_s:.0f} ms, bound {1e3 * full_cache.ttft.p95_s:.0f} ms")
    if not parts:
        return Line(what, target, "half of saturation was not measured", False)
    share = statistics.median(parts)
    return Line(what, target, f"{share:.2f} of it ({'; '.join(told)})", share <= 1.0)


def one_client(grid: Grid) -> Line:
    """Published, so that later ones can be compared with it: a ratio, as times belong to a machine."""
    what = f"{grid.name}: one client, mean TTFT of {grid.ours} over that of exact LRU over the same tiers"
    ratio = one_client_ratio(grid)
    return Line(what, "reported", "not measured" if ratio is None else f"{ratio:.3f}x", ratio is not None)


def one_client_ratio(grid: Grid) -> float | None:
    """The median of the repetitions."""
    ratios = []
    for repetition in grid.repetitions:
        one = repetition.at(grid.ours, 0.0)
        for other in (repetition.at(name, 0.0) for name in grid.systems("tiers-lru")):
            found = None if one is None or other is None else _over(one.ttft.mean_s, other.ttft.mean_s)
            ratios += [] if found is None else [found]
    return statistics.median(ratios) if ratios else None


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)
