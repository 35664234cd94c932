"""The quality target on a real server: quality that answers really have, and time beside fixed alphas."""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.report import Line
from evicbench.serving.runs import folder_of, serve
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import Cell, Summary, summarise

CONFIG = "quality-target"
TARGET = 0.97
LEAST = 0.965
"""Token F1 beside the full cache's answers."""

MOST_RATIO = 1.05


def measure() -> Iterator[Line]:
    serve(CONFIG)
    yield from lines(summarise(read_results(folder_of(CONFIG))))


def lines(summary: Summary) -> Iterator[Line]:
    target = summary.cell(f"evicpress q={TARGET:g}", 0.0)
    fixed = [cell for cell in summary.at(0.0) if cell.system.startswith("evicpress a=")]
    for cell in (*fixed, *([] if target is None else [target])):
        print(f"      {_row(cell)}", flush=True)
    quality, ttft_s = (None, None) if target is None else (_f1(target), target.ttft.mean_s)
    yield Line(
        f"real server, one client, --kv-quality {TARGET:g}: token F1 beside the full cache's answers",
        f">= {LEAST:g}",
        "not measured" if quality is None else f"{quality:.4f}",
        quality is not None and quality >= LEAST,
    )
    times = {cell.system: cell.ttft.mean_s for cell in fixed if (_f1(cell) or 0.0) >= LEAST}
    best_s, best = min(((each_s, name) for name, each_s in times.items() if each_s is not None), default=(None, ""))
    is_known = ttft_s is not None and best_s is not None
    yield Line(
        f"real server, one client, --kv-quality {TARGET:g}: mean TTFT over that of the fastest of {len(fixed)} fixed "
        f"alphas whose F1 is >= {LEAST:g}",
        f"<= {MOST_RATIO:g}x",
        f"{ttft_s / best_s:.3f}x ({1e3 * ttft_s:.1f} ms, {best} {1e3 * best_s:.1f} ms)"
        if ttft_s is not None and best_s is not None
        else "not measured, or no fixed alpha has it",
        is_known and (ttft_s or 0.0) <= MOST_RATIO * (best_s or 0.0),
    )


def _f1(cell: Cell) -> float | None:
    return cell.quality("f1_full_cache")


def _row(cell: Cell) -> str:
    ttft_s, quality = cell.ttft.mean_s, _f1(cell)
    times = "-" if ttft_s is None else f"{1e3 * ttft_s:.1f} ms"
    return f"{cell.system}: mean TTFT {times}, F1 {'-' if quality is None else f'{quality:.4f}'}"
