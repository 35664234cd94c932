"""EvicPress, figures 7 and 12: TTFT against quality, a point for each setting, at every level and for every family.

Run as `python -m sglang_evicpress.benchmark.figures.ttft_quality OUT_FOLDER`.
ttft_quality.png shows every level; families.png every family
of contexts at one of them.
"""

from __future__ import annotations

import argparse

from sglang_evicpress.benchmark.figures.drawing import kinds_of, level_of, run, save
from sglang_evicpress.benchmark.figures.trade_off import Panels, draw_panels, gap_rows, point_rows
from sglang_evicpress.benchmark.raw import Raw
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.benchmark.tables import level_name


def draw(options: argparse.Namespace, raw: Raw) -> None:
    summary = summarise(raw)
    levels = raw.levels if options.level is None else [options.level]
    kinds = kinds_of(summary)
    _save(options, raw, "ttft_quality", {_title(level): (summary, level) for level in levels}, kinds)
    level = level_of(options, raw)
    families: Panels = {
        f"all, {_title(level)}": (summary, level),
        **{family or "?": (summarise(raw, family), level) for family in raw.families},
    }
    _save(options, raw, "families", families, kinds)


def _save(options: argparse.Namespace, raw: Raw, name: str, shown: Panels, kinds: list[str]) -> None:
    lines = [f"Quality is {options.quality}.", "", *point_rows(shown, kinds, options.quality), ""]
    if name == "families":
        lines[:0] = [f"{level_name(level_of(options, raw))}.", ""]
    if "evicpress" in kinds:
        others = [kind for kind in kinds if kind not in ("evicpress", "bound")]
        lines += gap_rows(shown, "evicpress", others, options.quality)
    save(raw, name, draw_panels(shown, kinds, options.quality), lines)


def _title(level: float) -> str:
    return f"{level:g} requests/s" if level else "one client"


if __name__ == "__main__":
    run(__doc__, draw)
