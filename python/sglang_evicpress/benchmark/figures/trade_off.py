"""Quality against TTFT in panels, with the table of every point: for figures 7 and 12, and AdaptCache's figure 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sglang_evicpress.benchmark.curves import Curve, curve, gaps
from sglang_evicpress.benchmark.figures.drawing import QUALITY_NAMES, legend_above, look, milliseconds, panels
from sglang_evicpress.benchmark.summary import Summary
from sglang_evicpress.benchmark.tables import times
from sglang_evicpress.tables import markdown, ms, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panels = Mapping[str, tuple[Summary, float]]
"""Title -> what is shown, at which rate."""


def draw_panels(shown: Panels, kinds: Sequence[str], measure: str) -> Figure:
    """A mark for each setting, a line along each kind's envelope; up and to the left is better."""
    figure, axes = panels(len(shown))
    for each, (title, (summary, rate)) in zip(axes, shown.items(), strict=True):
        for kind in kinds:
            found = curve(summary, (kind,), rate, measure)
            if not found.points:
                continue
            style = look(kind)
            dots = [1e3 * point.ttft_s for point in found.points], [point.quality for point in found.points]
            each.plot(*dots, linestyle="none", label=kind, **style)
            line = found.envelope
            each.plot([1e3 * point.ttft_s for point in line], [point.quality for point in line], color=style["color"])
        each.set(title=title, xlabel="mean TTFT, ms", ylabel=QUALITY_NAMES[measure])
        milliseconds(each.xaxis)
        each.grid(alpha=0.3, which="both")
    legend_above(figure, axes)
    return figure


def point_rows(shown: Panels, kinds: Sequence[str], measure: str) -> Iterator[str]:
    """One row for each setting, panel by panel."""
    rows = []
    for title, (summary, rate) in shown.items():
        on_envelope = {point.system for kind in kinds for point in curve(summary, (kind,), rate, measure).envelope}
        for cell in summary.at(rate):
            if cell.kind in kinds:
                quality = number(cell.quality(measure))
                best = "yes" if cell.system in on_envelope else "no"
                rows.append([title, cell.system, quality, ms(cell.ttft.mean_s), times(cell.over_full_cache), best])
    head = ("panel", "system", "quality", "TTFT mean, ms", "of the full cache's (95 %)", "best of its kind")
    yield from markdown(head, rows)


def gap_rows(shown: Panels, ours: str, others: Sequence[str], measure: str) -> Iterator[str]:
    """Rows of one kind against each other one: times faster at equal quality, better at equal TTFT."""
    rows = []
    for title, (summary, rate) in shown.items():
        left = curve(summary, (ours,), rate, measure)
        for kind in others:
            right = curve(summary, (kind,), rate, measure)
            if left.points and right.points:
                rows.append([title, kind, *_faster(left, right), *_better(left, right)])
    head = (
        *("panel", f"{ours} against", "quality both reach", "TTFT lower by"),
        *("TTFT both reach, ms", "quality higher by"),
    )
    yield from markdown(head, rows)


def _faster(left: Curve, right: Curve) -> tuple[str, str]:
    found = gaps(left, right)
    if not found:
        return "none", "-"
    ratios = sorted(gap.ratio for gap in found)
    return f"{found[0].quality:.3f} to {found[-1].quality:.3f}", f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x"


def _better(left: Curve, right: Curve) -> tuple[str, str]:
    """At the TTFT of each setting of either curve that both reach."""
    found = []
    for ttft_s in sorted({point.ttft_s for point in (*left.points, *right.points)}):
        one, other = left.quality_at(ttft_s), right.quality_at(ttft_s)
        if one is not None and other:
            found.append((ttft_s, one / other - 1.0))
    if not found:
        return "none", "-"
    gains = sorted(gain for _, gain in found)
    return f"{ms(found[0][0])} to {ms(found[-1][0])}", f"{100 * gains[0]:+.1f} % to {100 * gains[-1]:+.1f} %"
