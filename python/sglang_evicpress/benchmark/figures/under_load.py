"""Answers/s, goodput and TTFT against requests/s offered, of every system under load; medians of the repetitions.

Run as `python -m sglang_evicpress.benchmark.figures.under_load OUT_FOLDER`,
for a config with a load.
"""

from __future__ import annotations

import argparse
import math

from sglang_evicpress.benchmark.figures.drawing import legend_above, look, milliseconds, panels, run, save
from sglang_evicpress.benchmark.load import loaded, median
from sglang_evicpress.benchmark.load_tables import load_lines, of
from sglang_evicpress.benchmark.results import Results


def draw(options: argparse.Namespace, results: Results) -> None:
    if not results.multiples:
        raise SystemExit(f"{results.run_dir} has no rates at multiples of saturation: expected a config with a load")
    runs = median(loaded(results))
    figure, (answers, goodput, ttft) = panels(3, width=4.0)
    for system in results.systems:
        rates = [each for each in of(runs, system["name"], None) if each.rate > 0]
        offered = [each.rate for each in rates]
        style = {"label": system["name"], **look(system["kind"])}
        answers.plot(offered, [_known(each.completed_rps) for each in rates], **style)
        goodput.plot(offered, [_known(each.goodput_rps) for each in rates], **style)
        ttft.plot(offered, [1e3 * _known(each.ttft.p95_s) for each in rates], **style)
    most = max(results.multiples)
    answers.plot([0, most], [0, most], color="lightgray", linewidth=1)
    answers.set(xlabel="requests/s offered", ylabel="answers/s")
    goodput.set(xlabel="requests/s offered", ylabel="goodput/s")
    ttft.set(xlabel="requests/s offered", ylabel="TTFT p95, ms", yscale="log")
    milliseconds(ttft.yaxis)
    for each in (answers, goodput, ttft):
        each.grid(alpha=0.3)
    legend_above(figure, (answers, goodput, ttft))
    save(results, "under_load", figure, list(load_lines(results)))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


if __name__ == "__main__":
    run(__doc__, draw)
