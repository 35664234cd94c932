"""`make show-profiler`: measures every promise of the profiler that a machine without a GPU can; one line each.

Ends with status 1 if a line is MISSED. Takes at most 30 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. Tables, plots and the figures they are made of are written to bench/out/profiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module

from foundation.report import Line
from lines import run_parts

PARTS = (
    ("profiler.insights", "insights", "measure_insights"),
    ("profiler.heldout", "heldout", "measure_heldout"),
    ("profiler.agreement", "agreement", "measure_agreement"),
    ("profiler.cost", "cost", "measure_cost"),
    ("profiler.durability", "durability", "measure_durability"),
    ("profiler.figure10", "figure10", "measure_figure10"),
    ("profiler.interference", "interference", "measure_interference"),
)
"""(module, name of the part, function that measures it); the first three look at the same contexts, measured once."""


def part(module: str, function: str) -> Callable[[], Iterable[Line]]:
    """Imported only when it runs: parts that are not asked for need not be importable."""
    return lambda: getattr(import_module(module), function)()


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, {name: part(module, function) for module, name, function in PARTS}))
