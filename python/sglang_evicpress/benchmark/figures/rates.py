"""EvicPress, figure 8: TTFT and ITL against requests/s, of settings whose quality is 0.8 and more at every rate.

Run as `python -m sglang_evicpress.benchmark.figures.rates OUT_FOLDER`.
Of each kind the picture shows the setting that bears most
requests/s, and of equals the one with the lower TTFT; the table has them all.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from sglang_evicpress.benchmark.curves import capacity, is_good, unloaded_p95
from sglang_evicpress.benchmark.figures.drawing import (
    QUALITY_NAMES,
    legend_above,
    look,
    milliseconds,
    panels,
    run,
    save,
)
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import Cell, Summary, summarise
from sglang_evicpress.benchmark.tables import LEAST_QUALITY, sustained
from sglang_evicpress.tables import markdown, ms, number


def draw(options: argparse.Namespace, results: Results) -> None:
    summary = summarise(results)
    settings = good_settings(summary, options.quality)
    if not settings:
        raise SystemExit(f"{results.run_dir} has no setting whose {options.quality} is {LEAST_QUALITY:g} at every rate")
    figure, (left, right) = panels(2, width=5.0)
    for cells in best_of_kinds(summary, settings, options.quality):
        label, style = cells[0].system, look(cells[0].kind)
        rates = [cell.rate for cell in cells]
        left.plot(rates, [_ms(cell.ttft.mean_s) for cell in cells], label=label, **style)
        right.plot(rates, [_ms(cell.itl.mean_s) for cell in cells], label=label, **style)
    left.set(xlabel="requests/s", ylabel="mean TTFT, ms")
    milliseconds(left.yaxis)
    right.set(xlabel="requests/s", ylabel="mean ITL, ms")
    for each in (left, right):
        each.grid(alpha=0.3)
    left.set_title(f"{QUALITY_NAMES[options.quality]} at least {LEAST_QUALITY:g}", fontsize="small", loc="left")
    legend_above(figure, (left, right))
    save(results, "rates", figure, list(_table(summary, settings, options.quality)))


def good_settings(summary: Summary, measure: str) -> list[list[Cell]]:
    """The cells, by rate, of each system that answers next to all requests, well enough, wherever it ran."""
    found = [summary.of(system["name"]) for system in summary.results.systems]
    return [
        cells for cells in found if all(cell.is_comparable and is_good(cell, LEAST_QUALITY, measure) for cell in cells)
    ]


def best_of_kinds(summary: Summary, settings: Sequence[list[Cell]], measure: str) -> list[list[Cell]]:
    best: dict[str, list[Cell]] = {}
    for cells in settings:
        other = best.get(cells[0].kind)
        if other is None or _merit(summary, cells, measure) > _merit(summary, other, measure):
            best[cells[0].kind] = cells
    return list(best.values())


def _merit(summary: Summary, cells: Sequence[Cell], measure: str) -> tuple[float, float]:
    limit = None if summary.results.full_cache is None else unloaded_p95(summary, summary.results.full_cache)
    found = None if limit is None else capacity(summary, cells[0].system, 2 * limit, measure=measure)
    return 0.0 if found is None else found.rps, -math.fsum(cell.ttft.mean_s or 0.0 for cell in cells)


def _table(summary: Summary, settings: Sequence[list[Cell]], measure: str) -> list[str]:
    rows, limits = [], []
    for cells in settings:
        for cell in cells:
            rate = number(cell.completed_rps, 2)
            ttft = (ms(cell.ttft.mean_s), ms(cell.ttft.p95_s), ms(cell.itl.mean_s))
            rows.append([cell.system, f"{cell.rate:g}", rate, *ttft, number(cell.quality(measure))])
        system = cells[0].system
        limits.append([system, *sustained(summary, system, measure)])
    head = ("system", "offered, requests/s", "completed", "TTFT mean, ms", "TTFT p95, ms", "ITL mean, ms", "quality")
    limits_head = ("system", "requests/s with TTFT p95 within 2x the full cache's with one client", "within 2x its own")
    return [
        f"Settings whose {measure} is {LEAST_QUALITY:g} and more at every rate; 0 offered is one client.",
        *("", *markdown(head, rows), "", *markdown(limits_head, limits)),
    ]


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else 1e3 * seconds


if __name__ == "__main__":
    run(__doc__, draw)
