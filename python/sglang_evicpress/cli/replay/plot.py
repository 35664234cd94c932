"""The picture of a replay: TTFT against quality, and where prompt tokens came from. matplotlib is imported only here,
and only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_evicpress.cli.pictures import write_picture
from sglang_evicpress.cli.replay.report import Result

MARKERS = "os^D"


def draw(results: Sequence[Result], path: str, title: str) -> None:
    """Write a PNG or SVG, whole or not at all; the type follows from the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 2.5 + 0.35 * max(len(results), 6)), layout="constrained")
    points, bars = figure.subplots(1, 2)
    figure.suptitle(title)
    labels = [_label(result) for result in results]
    for index, (result, label) in enumerate(zip(results, labels, strict=True)):
        marker = MARKERS[index // 10 % len(MARKERS)]  # colours come round after ten
        points.plot([result.quality], [result.ttft.mean_s], marker, markersize=9, label=label)
    points.set(xlabel="mean quality", ylabel="mean TTFT, s")
    points.set_ylim(0.0, 1.1 * max((result.ttft.mean_s for result in results), default=1.0) or 1.0)
    points.margins(x=0.1)
    points.grid(alpha=0.3)
    points.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    left = [0.0] * len(results)
    shares = [{**result.hit_share, "prefilled": result.prefilled_share} for result in results]
    for name in shares[0] if shares else ():
        widths = [100.0 * share[name] for share in shares]
        color = {"color": "lightgrey"} if name == "prefilled" else {}
        bars.barh(labels, widths, left=left, label=name, **color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    bars.set(xlabel="prompt tokens, %", xlim=(0.0, 100.0))
    bars.invert_yaxis()
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)
    write_picture(figure, path)


def _label(result: Result) -> str:
    label = result.policy if result.alpha is None else f"{result.policy} a={result.alpha:g}"
    label += "" if result.target is None else f" q={result.target:g}"
    return f"{label} (partial)" if result.is_partial else label
