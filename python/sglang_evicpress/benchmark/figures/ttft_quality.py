"""EvicPress, figures 7 and 12: TTFT against quality, a point for each setting, at every rate and for every family.

Run as `python -m sglang_evicpress.benchmark.figures.ttft_quality OUT_FOLDER`.
ttft_quality.png shows every rate; families.png every family
of contexts at one of them.
"""

from __future__ import annotations

import argparse

from sglang_evicpress.benchmark.figures.drawing import kinds_of, rate_of, run, save
from sglang_evicpress.benchmark.figures.trade_off import Panels, draw_panels, gap_rows, point_rows
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.tables import rate_label


def draw(options: argparse.Namespace, results: Results) -> None:
    summary = summarise(results)
    rates = results.rates if options.rate is None else [options.rate]
    kinds = kinds_of(summary)
    _save(options, results, "ttft_quality", {_title(rate): (summary, rate) for rate in rates}, kinds)
    rate = rate_of(options, results)
    families: Panels = {
        f"all, {_title(rate)}": (summary, rate),
        **{family or "?": (summarise(results, family), rate) for family in results.families},
    }
    _save(options, results, "families", families, kinds)


def _save(options: argparse.Namespace, results: Results, name: str, shown: Panels, kinds: list[str]) -> None:
    lines = [f"Quality is {options.quality}.", "", *point_rows(shown, kinds, options.quality), ""]
    if name == "families":
        lines[:0] = [f"{rate_label(rate_of(options, results))}.", ""]
    if "evicpress" in kinds:
        others = [kind for kind in kinds if kind not in ("evicpress", "full-cache")]
        lines += gap_rows(shown, "evicpress", others, options.quality)
    save(results, name, draw_panels(shown, kinds, options.quality), lines)


def _title(rate: float) -> str:
    return f"{rate:g} requests/s" if rate else "one client"


if __name__ == "__main__":
    run(__doc__, draw)
