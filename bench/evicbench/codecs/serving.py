"""EvicPress with codecs beside a fixed grid of forms with LRU, on real servers whose KV is bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.report import Line
from evicbench.serving.runs import draw, folder_of, serve
from sglang_evicpress.benchmark.curves import Curve, best_at_quality, curve, gaps
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import Cell, Summary, summarise
from sglang_evicpress.benchmark.tables import setting_lines, write_report

CONFIG = "codecs"
OURS = ("evicpress",)
LEAST = 0.97
TARGET, TARGET_F1 = 0.97, 0.965
BOUND = "full-cache+attention"
NOISE = 1.05
"""Two runs of the same differ by so much: a system is not above another that it exceeds by less."""


def measure() -> Iterator[Line]:
    serve(CONFIG)
    write_report(folder_of(CONFIG))
    draw(CONFIG, ("ttft_quality", "forms"))
    summary = summarise(read_results(folder_of(CONFIG)))
    for line in setting_lines(summary.results):
        print(f"    {line}", flush=True)
    yield beside_bound(summary)
    yield fast_hits(summary)
    yield beside_raw_presses(summary)
    yield beside_exact(summary)
    yield beside_grid(summary)
    yield at_target(summary)


def beside_bound(summary: Summary) -> Line:
    one, bound = best_at_quality(summary, OURS, 0.0, LEAST), summary.cell(BOUND, 0.0)
    what, target = f"mean TTFT beside {BOUND}, token F1 >= {LEAST}", "<= 2x"
    if one is None or bound is None:
        return Line(what, target, f"no setting of EvicPress reaches {LEAST}", False)
    ratio = _ttft(one) / _ttft(bound)
    return Line(what, target, f"{ratio:.2f}x ({_told(one)}; {_told(bound)})", ratio <= 2.0)


def fast_hits(summary: Summary) -> Line:
    one = best_at_quality(summary, OURS, 0.0, LEAST)
    others = [cell for cell in _raw_presses(summary) if (cell.quality("f1_full_cache") or 0.0) >= LEAST]
    what = f"share of prompt tokens hit on the GPU or in host memory, token F1 >= {LEAST}"
    target = ">= 2x the best fixed press without a codec"
    if one is None or not others:
        return Line(what, target, f"no setting of both reaches {LEAST}", False)
    best = max(others, key=_fast)
    ratio = _fast(one) / _fast(best)
    return Line(
        what, target, f"{ratio:.2f}x ({one.system} {_fast(one):.0%}, {best.system} {_fast(best):.0%})", ratio >= 2
    )


def beside_raw_presses(summary: Summary) -> Line:
    ours = curve(summary, OURS, 0.0)
    raw = {cell.system for cell in _raw_presses(summary)} | {"tiers-lru"}
    theirs = curve(summary, ("fixed", "tiers-lru"), 0.0)
    found = gaps(ours, Curve(tuple(point for point in theirs.points if point.system in raw)))
    worst = min(found, key=lambda gap: gap.ratio, default=None)
    figure = "no quality that both reach"
    if worst is not None:
        figure = f"{worst.ratio:.2f}x at F1 {worst.quality:.3f}, the least of {len(found)} qualities"
    return Line(
        "mean TTFT beside the best fixed press without a codec + LRU, over the whole curve",
        ">= 2x lower",
        figure,
        worst is not None and worst.ratio >= 2.0,
    )


def beside_exact(summary: Summary) -> Line:
    exact = summary.cell("tiers-lru", 0.0)
    one = best_at_quality(summary, OURS, 0.0, 0.99)
    what, target = "mean TTFT beside exact LRU over the same tiers, token F1 >= 0.99", ">= 3x lower"
    if one is None or exact is None:
        return Line(what, target, "no setting of EvicPress reaches 0.99", False)
    ratio = _ttft(exact) / _ttft(one)
    return Line(what, target, f"{ratio:.2f}x ({_told(one)}; {_told(exact)})", ratio >= 3.0)


def beside_grid(summary: Summary) -> Line:
    found = gaps(curve(summary, OURS, 0.0), curve(summary, ("fixed", "tiers-lru"), 0.0))
    figure = "no quality that both reach"
    if found:
        told = ", ".join(f"{gap.ratio:.2f}x at {gap.quality:.3f}" for gap in found)
        figure = f"best of the grid over EvicPress: {told}"
    ratios = [gap.ratio for gap in found]
    return Line(
        "mean TTFT beside the best of the grid {exact, keydiff@0.8, @0.5} x {raw, int8, int4} + LRU at equal token F1",
        f"never above it by more than {NOISE - 1:.0%}, >= 1.2x lower somewhere",
        figure,
        bool(ratios) and min(ratios) >= 1 / NOISE and max(ratios) >= 1.2,
    )


def at_target(summary: Summary) -> Line:
    """The quality target beside the fastest of the fixed alphas that have its quality."""
    what, target = f"--kv-quality {TARGET}", f"F1 >= {TARGET_F1}, TTFT <= {NOISE}x the best fixed alpha's of that F1"
    one = summary.cell(f"evicpress q={TARGET}", 0.0)
    if one is None:
        return Line(what, target, "not served", False)
    fixed = [
        cell
        for cell in summary.at(0.0)
        if cell.system.startswith("evicpress a=") and (cell.quality("f1_full_cache") or 0.0) >= TARGET_F1
    ]
    best = min(fixed, key=_ttft, default=None)
    if best is None:
        return Line(what, target, f"{_told(one)}; no fixed alpha has that F1", False)
    ratio, f1 = _ttft(one) / _ttft(best), one.quality("f1_full_cache") or 0.0
    return Line(what, target, f"{ratio:.2f}x ({_told(one)}; {_told(best)})", ratio <= NOISE and f1 >= TARGET_F1)


def _raw_presses(summary: Summary) -> list[Cell]:
    return [cell for cell in summary.at(0.0) if cell.kind == "fixed" and "+int" not in cell.system]


def _ttft(cell: Cell) -> float:
    return cell.ttft.mean_s or float("nan")


def _fast(cell: Cell) -> float:
    return sum((cell.held.hits or {}).get(tier, 0.0) for tier in ("gpu", "host"))


def _told(cell: Cell) -> str:
    return f"{cell.system} {1e3 * _ttft(cell):.0f} ms at F1 {cell.quality('f1_full_cache') or 0.0:.3f}"
