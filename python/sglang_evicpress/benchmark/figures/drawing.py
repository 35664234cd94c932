"""Shared parts of all figures: command line, look, and the places of picture and table.

A figure reads only an out folder of `evicpress bench serve`, and writes NAME.png and NAME.md into its folder `figures`.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_evicpress.benchmark.results import Results, read_results
from sglang_evicpress.benchmark.summary import QUALITIES, Summary
from sglang_evicpress.benchmark.tables import setting_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FOLDER = "figures"
STYLES = {
    "full-cache": ("k", "*"),
    "full-cache+attention": ("k", "+"),
    "prefill-only": ("tab:gray", "s"),
    "prefill-only+attention": ("tab:gray", "+"),
    "lru": ("tab:brown", "D"),
    "lru+attention": ("tab:brown", "+"),
    "hicache": ("tab:pink", "v"),
    "tiers-lru": ("tab:orange", "^"),
    "fixed": ("tab:green", "x"),
    "adaptcache": ("tab:purple", "P"),
    "impress": ("tab:cyan", "h"),
    "evicpress": ("tab:red", "o"),
    "evicpress-uniform": ("tab:red", "."),
}
"""Colour and mark of each kind of system."""

QUALITY_NAMES = {
    "f1_full_cache": "token F1 with the full cache's answer",
    "minilm_full_cache": "MiniLM cosine with the full cache's answer",
    "f1_truth": "token F1 with the true answer",
}


def run(doc: str | None, draw: Callable[[argparse.Namespace, Results], None]) -> None:
    """Run the script of a figure. Its options are ``out``, ``quality`` and ``rate`` (None for all, or the figure's own
    choice)."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER", help="what `evicpress bench serve` wrote")
    parser.add_argument(
        "--quality", choices=QUALITIES, default="f1_full_cache", help="its measure (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, help="requests/s (default: the lowest above 0)")
    options = parser.parse_args()
    draw(options, _results(options))


def _results(options: argparse.Namespace) -> Results:
    """Ends the program with one sentence when the folder is not a benchmark's, or lacks the rate."""
    try:
        results = read_results(options.out)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not results.runs:
        raise SystemExit(f"{options.out} has no complete run: expected one at least")
    if options.rate is not None and options.rate not in results.rates:
        known = ", ".join(f"{rate:g}" for rate in results.rates)
        raise SystemExit(f"rate {options.rate:g} was not run: expected one of {known}")
    return results


def rate_of(options: argparse.Namespace, results: Results) -> float:
    """The one that was asked for, else the lowest at which requests meet."""
    if options.rate is not None:
        return float(options.rate)
    return next((rate for rate in results.rates if rate > 0), results.rates[0])


def save(results: Results, name: str, figure: Figure, lines: Iterable[str]) -> None:
    """Both with the settings below; the table is printed as well."""
    folder = results.run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    settings = list(setting_lines(results))
    wrapped = [part for line in settings for part in textwrap.wrap(line, int(17 * figure.get_figwidth()))]
    figure.supxlabel("\n".join(wrapped), fontsize=6.5, color="dimgray")
    figure.savefig(folder / f"{name}.png", dpi=110)
    text = "\n".join([*lines, "", *(f"- {line}" for line in settings)])
    (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def panels(count: int, *, width: float = 4.2, height: float = 3.6, columns: int = 4) -> tuple[Figure, list[Axes]]:
    """A figure with so many axes in rows of at most ``columns``."""
    from matplotlib.figure import Figure

    across = min(columns, count)
    down = -(-count // across)
    figure = Figure(figsize=(max(6.0, width * across), height * down + 0.8), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def kinds_of(summary: Summary) -> list[str]:
    """Kinds of the systems that ran, in the plan's order."""
    return list(dict.fromkeys(system["kind"] for system in summary.results.systems))


def look(kind: str) -> dict[str, Any]:
    colour, mark = STYLES.get(kind, ("tab:olive", "."))
    return {"color": colour, "marker": mark, "markersize": 5}


def milliseconds(axis: Axis) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_above(figure: Figure, axes: Sequence[Axes], columns: int = 5) -> None:
    """One for all panels."""
    found = {label: line for each in axes for line, label in zip(*each.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns, fontsize="small")
