"""AdaptCache, figure 2: TTFT against quality per task, of adaptcache, fixed presses + LRU, LRU alone and prefill.

Run as `python -m sglang_evicpress.benchmark.figures.adaptcache OUT_FOLDER`.
The paper's tasks are here the families of contexts.
"""

from __future__ import annotations

import argparse

from sglang_evicpress.benchmark.figures.drawing import kinds_of, rate_of, run, save
from sglang_evicpress.benchmark.figures.trade_off import Panels, draw_panels, gap_rows, point_rows
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.tables import rate_label

OURS = "adaptcache"
SHOWN = (OURS, "fixed", "tiers-lru", "prefill-only")


def draw(options: argparse.Namespace, results: Results) -> None:
    rate, summary = rate_of(options, results), summarise(results)
    kinds = [kind for kind in SHOWN if kind in kinds_of(summary)]
    if OURS not in kinds:
        raise SystemExit(f"{results.run_dir} has no run of {OURS}: name it among the systems of the benchmark")
    shown: Panels = {
        **{family or "?": (summarise(results, family), rate) for family in results.families},
        "all": (summary, rate),
    }
    lines = [
        *(f"{rate_label(rate)}. Quality is {options.quality}.", ""),
        *point_rows(shown, kinds, options.quality),
        "",
        *gap_rows(shown, OURS, [kind for kind in kinds if kind != OURS], options.quality),
    ]
    save(results, "adaptcache", draw_panels(shown, kinds, options.quality), lines)


if __name__ == "__main__":
    run(__doc__, draw)
