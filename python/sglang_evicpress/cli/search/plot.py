"""The picture of a search: tokens kept by layer, and the score of every candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_evicpress.cli.pictures import write_picture
from sglang_evicpress.search.evolution import Step
from sglang_evicpress.search.layer_budgets import Budgets


def draw(budgets: Mapping[str, Budgets], steps: Sequence[Step], path: str, title: str, objective: str) -> None:
    """``budgets`` by name, the lowest layer at the left: a line each, as in EvolKV's figure 2a; ``steps`` as in 2b."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.0), layout="constrained")
    layers, search = figure.subplots(1, 2)
    figure.suptitle(title)
    for name, kept in budgets.items():
        layers.step(range(len(kept)), kept, where="mid", marker="o", label=name)
    layers.set(xlabel="layer", ylabel="tokens kept")
    layers.set_ylim(bottom=0)
    layers.xaxis.get_major_locator().set_params(integer=True)
    layers.legend()
    search.plot([step.score for step in steps], ".", color="lightgrey", label="every candidate")
    best = [(number, step.score) for number, step in enumerate(steps) if step.is_best]
    search.step(
        [number for number, _ in best],
        [score for _, score in best],
        where="post",
        label="the one of best fitness so far",
    )
    search.set(xlabel="candidate", ylabel=objective)
    search.legend()
    for axes in (layers, search):
        axes.grid(alpha=0.3)
    write_picture(figure, path)
