"""EvicPress as an evictor alone, nothing compressed, against policies that only choose the victim, and Belady's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evicbench.policy.runs import COSTS, LIMITS, SLOT_BYTES, in_processes, load, trace_file
from evicbench.report import Line
from sglang_evicpress.core import Tier
from sglang_evicpress.simulator import runs
from sglang_evicpress.simulator.future import Future
from sglang_evicpress.simulator.replay import Machine
from sglang_evicpress.simulator.runs import Settings, make_replay

RIVALS = ("lru", "slru", "gdsf", "tlru", "hpt", "s3fifo", "sieve")
MIXES = ((1.0, 4.0, 20.0), (0.5, 2.0, 10.0), (3.0, 10.0, 50.0), (5.0, 0.0, 0.0))
"""GPU, host and SSD in percent of the working set."""

TRACES = ("mooncake", "miniswe", "weka")

LEAST_REQUESTS = 2000  # of a trace that is judged; shorter ones are told
MOST_MEAN, MOST_ANY = 1.01, 1.03
MUCH_BETTER = 0.95  # Belady's TTFT over that of the best rival, where predicting is worth it
LEAST_CLOSED = 0.15


@dataclass(frozen=True, slots=True)
class Cell:
    """A trace on tiers of these sizes; the first half of the requests warms up, the second is judged."""

    trace: str
    sizes: tuple[float, ...]
    limit: int | None

    def mean_ttft(self, policy: str) -> float:
        """Seconds; whoever serves, loads only what is not prefilled sooner."""
        trace, working_set = load(self.trace, self.limit)
        capacity = {
            tier: int(working_set * size / 100) * SLOT_BYTES
            for tier, size in zip(Tier, self.sizes, strict=False)
            if size > 0
        }
        settings = Settings(Machine(capacity, COSTS), SLOT_BYTES, (), recompute="all")
        future = Future(trace) if policy == "belady" else None
        outcomes = list(make_replay(trace, runs.Run(policy), settings, future).run())
        return statistics.fmean(outcome.ttft_s for outcome in outcomes[len(outcomes) // 2 :])


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean TTFT in seconds: of EvicPress, Belady's policy and the best rival."""

    cell: Cell
    ours_s: float
    belady_s: float
    best_s: float
    best: str

    @property
    def ratio(self) -> float:
        return self.ours_s / self.best_s

    @property
    def closed(self) -> float | None:
        """Share of the way from the best rival to Belady's that EvicPress goes; None where that is short."""
        if self.belady_s > MUCH_BETTER * self.best_s:
            return None
        return (self.best_s - self.ours_s) / (self.best_s - self.belady_s)


def compare(cell: Cell) -> Figures:
    by_rival = {policy: cell.mean_ttft(policy) for policy in RIVALS}
    best = min(by_rival, key=lambda policy: by_rival[policy])
    return Figures(cell, cell.mean_ttft("evicpress"), cell.mean_ttft("belady"), by_rival[best], best)


def measure(traces: Sequence[str] = TRACES, limit: int | None = None) -> Iterator[Line]:
    cells = [Cell(trace, sizes, limit or LIMITS.get(trace)) for trace in traces for sizes in MIXES]
    found = list(in_processes(compare, cells))
    for each in found:
        mix, closed = "/".join(f"{size:g}" for size in each.cell.sizes), each.closed
        print(
            f"      {each.cell.trace} {mix:9s} %: evicpress {each.ours_s:.4f} s, {each.best} {each.best_s:.4f} s "
            f"({each.ratio - 1.0:+.1%}), belady {each.belady_s:.4f} s"
            + ("" if closed is None else f", {closed:.0%} of the way"),
            flush=True,
        )
    judged = [each for each in found if len(load(each.cell.trace, each.cell.limit)[0].requests) >= LEAST_REQUESTS]
    told = ", ".join(sorted({trace_file(each.cell.trace).rsplit("/", 1)[-1] for each in judged}))
    ratios, gaps = [each.ratio for each in judged], [each.closed for each in judged if each.closed is not None]
    if not ratios:
        return
    yield Line(
        f"nothing compressed: mean TTFT beside the best of {', '.join(RIVALS)} on {len(ratios)} cells",
        f"<= {MOST_MEAN - 1:+.0%} on average, {MOST_ANY - 1:+.0%} on any",
        f"{statistics.fmean(ratios) - 1:+.1%} on average, worst {max(ratios) - 1:+.1%} ({told})",
        statistics.fmean(ratios) <= MOST_MEAN and max(ratios) <= MOST_ANY,
    )
    yield Line(
        f"the same, of the way to Belady's policy, on {len(gaps)} cells where that is 5 % faster",
        f">= {LEAST_CLOSED:.0%} on average",
        f"{statistics.fmean(gaps):.0%}" if gaps else "nowhere",
        bool(gaps) and statistics.fmean(gaps) >= LEAST_CLOSED,
    )
