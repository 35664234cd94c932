"""EvicPress, figure 11: which forms are held in each tier after the runs, by the tokens that they stand for.

Run as `python -m sglang_evicpress.benchmark.figures.forms OUT_FOLDER`.
One picture for every system whose server told, evicpress first.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from sglang_evicpress.benchmark.figures.drawing import rate_of, run, save
from sglang_evicpress.benchmark.results import TIERS, Results
from sglang_evicpress.benchmark.summary import Cell, summarise
from sglang_evicpress.benchmark.tables import rate_label
from sglang_evicpress.core import Form
from sglang_evicpress.tables import markdown, number, share


def draw(options: argparse.Namespace, results: Results) -> None:
    from matplotlib.figure import Figure

    rate = rate_of(options, results)
    cells = [cell for cell in summarise(results).at(rate) if cell.held.forms]
    if not cells:
        raise SystemExit(f"{results.run_dir} does not say at rate {rate:g} which forms were resident")
    cells.sort(key=lambda cell: cell.kind != "evicpress")
    names = sorted({form for cell in cells for held in (cell.held.forms or {}).values() for form in held}, key=_order)
    figure = Figure(figsize=(9.0, 1.6 * len(cells) + 1.6), layout="constrained")
    for axes, cell in zip(figure.subplots(len(cells), 1, squeeze=False, sharex=True)[:, 0], cells, strict=True):
        tiers = [tier for tier in TIERS if tier in (cell.held.forms or {})]
        begin = [0.0] * len(tiers)
        for number_, name in enumerate(names):
            widths = [100 * shares_of((cell.held.forms or {})[tier]).get(name, 0.0) for tier in tiers]
            axes.barh(tiers, widths, left=begin, label=name, color=f"C{number_ % 10}", hatch="//" * (number_ // 10))
            begin = [start + width for start, width in zip(begin, widths, strict=True)]
        axes.set_title(cell.system, fontsize="small")
        axes.invert_yaxis()
    axes.set(xlabel="tokens held, %", xlim=(0, 100))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="x-small")
    rows = [_row(cell, tier, names) for cell in cells for tier in TIERS if tier in (cell.held.forms or {})]
    head = ("system", "tier", "tokens", "mean kept fraction", *names)
    text = [f"After the runs at this rate: {rate_label(rate)}. Shares of the tokens held.", ""]
    save(results, "forms", figure, [*text, *markdown(head, rows)])


def shares_of(held: Mapping[str, float]) -> dict[str, float]:
    """Shares of all tokens; nothing where there are none."""
    total = sum(held.values())
    return {form: tokens / total for form, tokens in held.items()} if total else {}


def mean_kept(held: Mapping[str, float]) -> float | None:
    """The fraction of a tier's tokens whose KV it holds."""
    shares = shares_of(held)
    return sum(part * Form.parse_stored(form).kept_fraction for form, part in shares.items()) if shares else None


def _row(cell: Cell, tier: str, names: list[str]) -> list[str]:
    held = (cell.held.forms or {})[tier]
    shares = shares_of(held)
    kept = number(mean_kept(held), 2)
    return [cell.system, tier, f"{sum(held.values()):.0f}", kept, *(share(shares.get(name, 0.0)) for name in names)]


def _order(name: str) -> tuple[str, float]:
    form = Form.parse_stored(name)
    return form.press or "", -form.kept_fraction


if __name__ == "__main__":
    run(__doc__, draw)
