"""HTML page of the demo: table, plots and the radix tree in one file without anything from the network."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from evicbench.demo.report import HEAD, caveats, cells, comparisons, rows, tokens_by_source
from sglang_evicpress.benchmark.figures.drawing import milliseconds
from sglang_evicpress.benchmark.results import TIERS, read_tree
from sglang_evicpress.benchmark.summary import Summary
from sglang_evicpress.core import Form

PAGE = "index.html"
COLOURS = {"gpu": "#d62728", "host": "#ff7f0e", "ssd": "#1f77b4", "computed": "#cccccc"}

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}td:first-child{text-align:left}"
    "svg{max-width:100%;height:auto}li{color:#555}.key{padding:0 .6em;color:#fff}"
)
_TREE_WIDTH, _ROW = 960, 14
_LEAST_TOKENS = 64
"""Shorter nodes, of questions and answers, are not drawn; nor are they ever compressed."""


def write_page(summary: Summary) -> Path:
    """Its file, in the folder of the benchmark."""
    path = summary.results.run_dir / PAGE
    path.write_text("\n".join(_page(summary)) + "\n", encoding="utf-8")
    return path


def _page(summary: Summary) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>EvicPress demo</title><style>{_STYLE}</style>"
    yield "<h1>EvicPress demo</h1><table>"
    yield f"<tr>{''.join(f'<th>{escape(cell)}' for cell in HEAD)}"
    yield from (f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows(summary))
    yield f"</table><ul>{''.join(f'<li>{escape(line)}' for line in comparisons(summary))}</ul>"
    yield _plots(summary)
    if (ours := cells(summary).get("evicpress")) and (
        nodes := read_tree(summary.results.runs_of(ours.system, 0.0)[-1])
    ):
        yield "<h2>Radix tree of evicpress after the last request</h2><p>One row for each context, from its first token"
        yield "on the left to its last on the right. Colour is the fastest tier that has it:"
        yield from (f'<span class=key style="background:{COLOURS[tier]}">{tier}</span>' for tier in TIERS)
        yield f"The full part of a node is the share of its tokens that is kept.</p>{tree(nodes)}"
    yield f"<h2>How it was measured</h2><ul>{''.join(f'<li>{escape(line)}' for line in caveats(summary))}</ul>"


def _plots(summary: Summary) -> str:
    """Four panels as SVG: mean and p95 of TTFT, its distribution, where tokens came from, and quality."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    named = cells(summary)
    names = list(named)
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        (means, spread), (tokens, quality) = figure.subplots(2, 2)
        means.barh(names, [1e3 * (cell.ttft.p95_s or 0) for cell in named.values()], color="lightgray", label="p95")
        means.barh(names, [1e3 * (cell.ttft.mean_s or 0) for cell in named.values()], color="tab:red", label="mean")
        means.set(xlabel="TTFT, ms")
        means.legend()
        for name, cell in named.items():
            requests = [each for run in summary.results.runs_of(cell.system, 0.0) for each in run.requests.values()]
            times = sorted(1e3 * each.ttft_s for each in requests if each.ttft_s is not None)
            spread.step(times, [(rank + 1) / len(times) for rank in range(len(times))], where="post", label=name)
        spread.set(xlabel="TTFT, ms", ylabel="share of requests")
        milliseconds(spread.xaxis)
        spread.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        begin = [0.0] * len(names)
        parts = [tokens_by_source(cell) for cell in named.values()]
        for source, colour in COLOURS.items():
            widths = [100 * part[source] for part in parts]
            tokens.barh(names, widths, left=begin, color=colour, label=source)
            begin = [start + width for start, width in zip(begin, widths, strict=True)]
        tokens.set(xlabel="prompt tokens, %", xlim=(0, 100))
        tokens.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        quality.barh(names, [cell.qualities.f1_full_cache or 0.0 for cell in named.values()], color="tab:green")
        quality.set(xlabel="token F1 with the answer of the full cache", xlim=(0, 1.02))
        for axes in (means, tokens, quality):
            axes.invert_yaxis()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def tree(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Nodes of ``/evicpress/tree`` as SVG: across, positions of tokens; down, one row for each leaf."""
    drawn = {node["id"]: node for node in nodes if node["num_tokens"] >= _LEAST_TOKENS}
    children: dict[int | None, list[int]] = {}
    for node in drawn.values():
        children.setdefault(node["parent_id"] if node["parent_id"] in drawn else None, []).append(node["id"])
    scale = _TREE_WIDTH / max((node["start"] + node["num_tokens"] for node in drawn.values()), default=1)
    shapes: list[str] = []

    def draw(node_id: int, row: int) -> int:
        """The row below all of its leaves."""
        end = row
        for child in children.get(node_id, ()):
            end = draw(child, end)
        end = max(end, row + 1)
        node = drawn[node_id]
        left, width = scale * node["start"], scale * node["num_tokens"] - 1
        kept = Form.parse_stored(node["form"]).kept_fraction
        colour, height = COLOURS[node["tier"]], _ROW * (end - row) - 2
        text = f"{node['form']} on {node['tier']}, {node['num_tokens']} tokens, matched {node['num_hits']} times"
        for share, opacity in ((1.0, 0.2), (kept, 0.7)):
            shapes.append(
                f'<rect x="{left:.1f}" y="{_ROW * row}" width="{width * share:.1f}" height="{height}" fill="{colour}" '
                f'fill-opacity="{opacity}"><title>{escape(text)}</title></rect>'
            )
        shapes.append(f'<text x="{left + 4:.1f}" y="{_ROW * row + 10}">{escape(node["form"])}</text>')
        return end

    end = 0
    for node_id in children.get(None, ()):
        end = draw(node_id, end)
    rest = len(nodes) - len(drawn)
    return (
        f'<svg viewBox="0 0 {_TREE_WIDTH} {_ROW * end}" font-size="9" font-family="sans-serif">{"".join(shapes)}</svg>'
        f"<p>{len(drawn)} nodes; {rest} of fewer than {_LEAST_TOKENS} tokens, questions and answers, are not drawn.</p>"
    )
