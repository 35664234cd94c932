"""EvicPress, figure 9: which share of the prompts' tokens each tier served, and quality beside it.

Run as `python -m sglang_evicpress.benchmark.figures.hits OUT_FOLDER`.
"""

from __future__ import annotations

import argparse

from sglang_evicpress.benchmark.figures.drawing import QUALITY_NAMES, legend_above, rate_of, run, save
from sglang_evicpress.benchmark.results import TIERS, Results
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.tables import rate_label
from sglang_evicpress.tables import markdown, ms, number, share

COLOURS = {"gpu": "tab:red", "host": "tab:orange", "ssd": "tab:blue"}


def draw(options: argparse.Namespace, results: Results) -> None:
    from matplotlib.figure import Figure

    rate = rate_of(options, results)
    cells = [cell for cell in summarise(results).at(rate) if cell.held.hit_share is not None]
    if not cells:
        raise SystemExit(f"{results.run_dir} says of no request at rate {rate:g} how much of it was cached")
    figure = Figure(figsize=(9.0, 1.8 + 0.26 * len(cells)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    names = [cell.system for cell in cells]
    begin = [0.0] * len(cells)
    for tier in TIERS:
        widths = [100 * (cell.held.hits or {}).get(tier, 0.0) for cell in cells]
        left.barh(names, widths, left=begin, color=COLOURS[tier], label=tier)
        begin = [start + width for start, width in zip(begin, widths, strict=True)]
    rest = [100 * (cell.held.hit_share or 0.0) if cell.held.hits is None else 0.0 for cell in cells]
    if any(rest):
        left.barh(names, rest, left=begin, color="lightgray", label="cached, tier unknown")
    right.barh(names, [cell.quality(options.quality) or 0.0 for cell in cells], color="tab:gray")
    left.set(xlabel="prompt tokens from a cache, %", xlim=(0, 100))
    right.set(xlabel=QUALITY_NAMES[options.quality], xlim=(0, 1.02))
    left.set_title(rate_label(rate), fontsize="small", loc="left")
    left.margins(y=0.01)
    left.invert_yaxis()
    legend_above(figure, (left,))
    rows = [
        [
            *(cell.system, share(cell.held.hit_share), *(share((cell.held.hits or {}).get(tier)) for tier in TIERS)),
            *(share(1.0 - (cell.held.hit_share or 0.0)), number(cell.quality(options.quality)), ms(cell.ttft.mean_s)),
        ]
        for cell in cells
    ]
    head = ("system", "cached", *(f"by {tier}" for tier in TIERS), "computed", options.quality, "TTFT mean, ms")
    lines = [f"{rate_label(rate)}; shares of the prompts' tokens.", "", *markdown(head, rows)]
    save(results, "hits", figure, lines)


if __name__ == "__main__":
    run(__doc__, draw)
