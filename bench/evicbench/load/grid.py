"""Makes the runs of settings under load, each in an out folder of its own that goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.load.targets import Grid, targets
from evicbench.report import Line
from evicbench.serving.runs import draw, folder_of, serve
from sglang_evicpress.benchmark.results import Results, read_results
from sglang_evicpress.benchmark.tables import setting_lines

GRID = ("load-outside", "load-mooncake", "load-bursts", "load-refusing")
"""Settings of `make bench-load`, each a file of bench/configs."""

FIGURES = ("under_load", "hits", "forms")


def finished(name: str) -> Results:
    """Runs of one setting so far. Raises ValueError where there are none."""
    return read_results(folder_of(name))


def measure(name: str, repetitions: int | None = None) -> Iterator[Line]:
    """The lines of one setting, behind its runs."""
    serve(name, repetitions)
    draw(name, FIGURES)
    results = finished(name)
    for line in setting_lines(results):
        print(f"    {line}", flush=True)
    yield from targets(Grid.of(results))
