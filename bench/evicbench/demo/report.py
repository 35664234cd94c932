"""Text of the demo: what begins, the table of four systems, bars, and where to look next."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.ratios import paired
from sglang_evicpress.benchmark.results import RUNS, TIERS, Run
from sglang_evicpress.benchmark.summary import Cell, Summary
from sglang_evicpress.benchmark.tables import TABLES, setting_lines
from sglang_evicpress.tables import aligned, ms, number, share

SYSTEMS = {
    "lru+attention": "lru",
    "tiers-lru": "lru over tiers",
    "evicpress": "evicpress",
    "full-cache+attention": "full cache",
}
"""Kind of system -> its name in the demo, in the order of the table."""

HEAD = ("", "TTFT mean, ms", "TTFT p95, ms", "prompt tokens cached", "answers like uncompressed, F1", "the same answer")
_WIDTH = 48
_SHADES = {"gpu": "█", "host": "▓", "ssd": "▒", "computed": "·"}


def opening(config: Config, out: Path) -> Iterator[str]:
    """Printed before anything starts."""
    memory = config.memory
    yield (
        f"{config.workload.requests} questions about shared contexts, by one client, the same for four servers one "
        "after the other: about 6 minutes on 2 cores."
    )
    told = {
        "lru": f"drops what the GPU pool, {memory.gpu:.0%} of the contexts' KV, cannot hold",
        "lru over tiers": f"moves it to host RAM ({memory.host:.0%}) and SSD ({memory.ssd:.0%}) instead",
        "evicpress": "the same memory; compresses where that costs less than moving or dropping",
        "full cache": "a pool that holds everything uncompressed: the reference for answers",
    }
    yield from (f"  {name:<16}{told[name]} ({kind} in logs)" for kind, name in SYSTEMS.items())
    yield f"Server logs and all answers go to {shown(out)}."


def cells(summary: Summary) -> dict[str, Cell]:
    """Name in the demo -> figures with one client, in the order of the table."""
    found = {cell.kind: cell for cell in summary.at(0.0)}
    return {name: found[kind] for kind, name in SYSTEMS.items() if kind in found}


def rows(summary: Summary) -> list[list[str]]:
    """Rows of the table below ``HEAD``."""
    return [
        [
            *(name, ms(cell.ttft.mean_s), ms(cell.ttft.p95_s), share(cell.held.hit_share)),
            *(number(cell.qualities.f1_full_cache), share(same_answers(summary, cell))),
        ]
        for name, cell in cells(summary).items()
    ]


def same_answers(summary: Summary, cell: Cell) -> float | None:
    """Share of the answers that equal the full cache's, word for word."""
    results = summary.results
    answers = {run.system: _answers(run) for run in results.runs if run.rate == 0.0 and run.repetition == 0}
    exact, given = answers.get(results.full_cache or "", {}), answers[cell.system]
    both = exact.keys() & given.keys()
    return sum(exact[index] == given[index] for index in both) / len(both) if both else None


def _answers(run: Run) -> dict[int, str]:
    return {index: request.answer for index, request in run.requests.items() if request.is_complete}


def tokens_by_source(cell: Cell) -> dict[str, float]:
    """Shares of the prompts' tokens: by tier, and computed."""
    hits = cell.held.hits or {}
    by_tier = {tier: hits.get(tier, 0.0) for tier in TIERS}
    return {**by_tier, "computed": max(0.0, 1.0 - sum(by_tier.values()))}


def comparisons(summary: Summary) -> Iterator[str]:
    """TTFT of EvicPress beside the others', request by request."""
    named = cells(summary)
    ours = named.get("evicpress")
    for name, cell in named.items():
        found = None if ours is None or cell is ours else paired(summary.results, ours.system, cell.system, 0.0)
        if found is not None:
            yield (
                f"mean TTFT of evicpress is {found.ratio:.2f} times that of {name} "
                f"(95 % interval {found.low:.2f} to {found.high:.2f})"
            )


def report(summary: Summary, page: Path, took_s: float) -> Iterator[str]:
    """Printed at the end."""
    named = cells(summary)
    yield from ("", *aligned([HEAD, *rows(summary)]), "", "TTFT mean, ms")
    longest = max((cell.ttft.mean_s or 0.0 for cell in named.values()), default=0.0) or 1.0
    for name, cell in named.items():
        bar = "█" * max(1, round(_WIDTH * (cell.ttft.mean_s or 0.0) / longest))
        yield f"  {name:<15} {bar} {ms(cell.ttft.mean_s)}"
    yield from ("", f"Prompt tokens from: {', '.join(f'{shade} {name}' for name, shade in _SHADES.items())}")
    for name, cell in named.items():
        yield f"  {name:<15} {stacked(tokens_by_source(cell))}"
    yield ""
    for line in (*comparisons(summary), *caveats(summary)):
        yield textwrap.fill(line, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    yield from ("", f"{took_s:.0f} s in all. Look next at", f"  {shown(page):<40} plots, and the radix tree at the end")
    out = summary.results.run_dir
    yield f"  {shown(out / TABLES):<40} more figures of each system"
    yield f"  {shown(out / RUNS):<40} every request with its answer; logs/ beside it has the servers'"
    yield "  bench/README.md                          what each figure means"
    yield "  README.md                                how to start it for a model of yours"


def caveats(summary: Summary) -> Iterator[str]:
    """Caveats that a reader must know before believing the figures."""
    yield (
        "one run of a tiny model on a CPU; all four use the same CPU attention, ours, so that only the cache differs: "
        "SGLang's own is slower on cached prefixes"
    )
    yield from setting_lines(summary.results)
    yield from (note for note in summary.notes if "minilm" not in note)


def stacked(parts: dict[str, float]) -> str:
    """One bar whose parts have the shade of their name."""
    bar, end = "", 0.0
    for name, part in parts.items():
        end += part
        bar += _SHADES[name] * (round(_WIDTH * end) - len(bar))
    return bar


def shown(path: Path) -> str:
    """From the folder of the shell, where it is below that."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
