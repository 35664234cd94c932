"""AdaptCache, figure 2: TTFT against quality per task, of adaptcache, fixed presses + LRU, LRU alone and prefill.

Run as `python -m sglang_evicpress.benchmark.figures.adaptcache OUT_FOLDER`.
The paper's tasks are here the families of contexts.
"""

from __future__ import annotations

import argparse

from sglang_evicpress.benchmark.figures.drawing import kinds_of, level_of, run, save
from sglang_evicpress.benchmark.figures.trade_off import Panels, draw_panels, gap_rows, point_rows
from sglang_evicpress.benchmark.raw import Raw
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.tables import level_name

OURS = "adaptcache"
SHOWN = (OURS, "fixed", "tiers-lru", "prefill-only")


def draw(options: argparse.Namespace, raw: Raw) -> None:
    level, summary = level_of(options, raw), summarise(raw)
    kinds = [kind for kind in SHOWN if kind in kinds_of(summary)]
    if OURS not in kinds:
        raise SystemExit(f"{raw.folder} has no run of {OURS}: name it among the systems of the benchmark")
    shown: Panels = {
        **{family or "?": (summarise(raw, family), level) for family in raw.families},
        "all": (summary, level),
    }
    lines = [
        *(f"{level_name(level)}. Quality is {options.quality}.", ""),
        *point_rows(shown, kinds, options.quality),
        "",
        *gap_rows(shown, OURS, [kind for kind in kinds if kind != OURS], options.quality),
    ]
    save(raw, "adaptcache", draw_panels(shown, kinds, options.quality), lines)


if __name__ == "__main__":
    run(__doc__, draw)
