"""The pictures of `make show-profiler`. matplotlib is imported only where something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evicbench.paths import out_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(name: str, figure: Figure) -> None:
    figure.savefig(out_file("profiler", name), dpi=110)


def draw_sensitivity(values: Mapping[float, Mapping[str, Sequence[float]]]) -> None:
    """``values``: kept fraction -> family -> sensitivities. The paper's figure 3, a panel for each kept fraction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * len(values), 4.0), layout="constrained")
    for axes, (kept, families) in zip(figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True):
        for index, (family, found) in enumerate(families.items()):
            steps = [0.0, *sorted(found)]
            heights = [number / len(found) for number in range(len(steps))]
            style = "-" if index < 5 else "--"
            axes.step(steps, heights, where="post", linestyle=style, label=family)
        axes.set(xlabel="sensitivity: quality lost by keydiff", ylabel="share of contexts", title=f"{kept:g} kept")
        axes.set(xlim=(-0.02, 1.02), ylim=(0.0, 1.03))
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure("sensitivity.png", figure)


def draw_wins(counts: Mapping[float, Mapping[str, int]], presses: Sequence[str], tie: str) -> None:
    """``counts``: kept fraction -> press or tie -> number of contexts. One stacked bar for each kept fraction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.8), layout="constrained")
    axes = figure.subplots()
    labels = [f"{kept:g} kept" for kept in counts]
    left = [0] * len(labels)
    for name in (*presses, tie):
        widths = [found.get(name, 0) for found in counts.values()]
        look: dict[str, Any] = {"color": "white", "edgecolor": "grey", "hatch": "//"} if name == tie else {}
        if any(widths):
            axes.barh(labels, widths, left=left, label=name, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(xlabel="contexts whose best press this is")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure("wins.png", figure)
