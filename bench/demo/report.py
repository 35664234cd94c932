"""Report of the demo: figures of a run, the table of two runs, and a picture of the tree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.workload import Turn, token_f1

from demo.load import Answer

_BAR_WIDTH = 24
_CONTEXT_SHARE = 0.5  # a node of at least half a context's tokens is one; the others are questions and answers


@dataclass(frozen=True, slots=True)
class Figures:
    """One run over the workload. Times in seconds; shares and qualities in [0, 1]."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    total_s: float
    hit_share: float
    computed_tokens: int
    recomputed_tokens: int
    similarity: float
    truth_f1: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def recomputed_tokens(turns: Sequence[Turn], answers: Sequence[Answer], context_tokens: int) -> int:
    """Tokens of contexts that had been asked about before and were computed once more."""
    seen: set[int] = set()
    tokens = 0
    for turn, answer in zip(turns, answers, strict=True):
        if turn.context_id in seen:
            tokens += max(0, context_tokens - answer.cached_tokens)
        seen.add(turn.context_id)
    return tokens


def figures(
    turns: Sequence[Turn],
    answers: Sequence[Answer],
    reference: Sequence[Answer],
    *,
    context_tokens: int,
    total_s: float,
) -> Figures:
    """`reference` are the answers of the same turns on exact KV."""
    ttfts = [answer.ttft_s for answer in answers]
    pairs = list(zip(answers, reference, strict=True))
    return Figures(
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        total_s=total_s,
        hit_share=sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers),
        computed_tokens=sum(answer.computed_tokens for answer in answers),
        recomputed_tokens=recomputed_tokens(turns, answers, context_tokens),
        similarity=statistics.fmean(token_f1(answer.text, exact.text) for answer, exact in pairs),
        truth_f1=statistics.fmean(
            token_f1(answer.text, turn.answer) for turn, answer in zip(turns, answers, strict=True)
        ),
    )


def table(lru: Figures, evicpress: Figures, lru_stats: Mapping[str, Any], evicpress_stats: Mapping[str, Any]) -> str:
    """Markdown; the last column is evicpress divided by lru where that says something."""
    rows: list[tuple[str, str, str, str]] = [("", "lru", "evicpress", "evicpress / lru")]

    def ratio(name: str, left: float, right: float, text: str, factor: float = 1.0) -> None:
        share = f"{right / left:.2f}" if left else "-"
        rows.append((name, text.format(left * factor), text.format(right * factor), share))

    ratio("TTFT mean, ms", lru.ttft_mean_s, evicpress.ttft_mean_s, "{:.0f}", 1000)
    ratio("TTFT p50, ms", lru.ttft_p50_s, evicpress.ttft_p50_s, "{:.0f}", 1000)
    ratio("TTFT p95, ms", lru.ttft_p95_s, evicpress.ttft_p95_s, "{:.0f}", 1000)
    ratio("whole run, s", lru.total_s, evicpress.total_s, "{:.1f}")
    ratio("prefix-hit share, %", lru.hit_share, evicpress.hit_share, "{:.1f}", 100)
    ratio("tokens recomputed", lru.recomputed_tokens, evicpress.recomputed_tokens, "{:.0f}")
    for form in forms_chosen(lru_stats, evicpress_stats):
        counts = [times_chosen(stats, form) for stats in (lru_stats, evicpress_stats)]
        rows.append((f"nodes brought to {form}" if form != "drop" else "nodes dropped", *map(str, counts), ""))
    ratio("tokens dropped", dropped_tokens(lru_stats), dropped_tokens(evicpress_stats), "{:.0f}")
    rows.append(("tokens resident at the end", resident(lru_stats), resident(evicpress_stats), ""))
    rows.append(("answers like uncompressed, F1", "1 (reference)", f"{evicpress.similarity:.3f}", ""))
    ratio("answers like the truth, F1", lru.truth_f1, evicpress.truth_f1, "{:.3f}")
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the header, columns padded so that it reads as plain text too."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def forms_chosen(*all_stats: Mapping[str, Any]) -> list[str]:
    """Every form that some run chose, by press and from the largest kept fraction down; `drop` is always last."""
    chosen = {form for stats in all_stats for form in stats["decisions"]["compressed"]}
    by_press_and_kept = sorted(chosen, key=lambda form: (form.partition("@")[0], -float(form.partition("@")[2])))
    return [*by_press_and_kept, "drop"]


def times_chosen(stats: Mapping[str, Any], form: str) -> int:
    """Times the policy chose it, as `/evicpress/stats` counts."""
    decisions = stats["decisions"]
    return int(decisions["dropped"] if form == "drop" else decisions["compressed"].get(form, 0))


def dropped_tokens(stats: Mapping[str, Any]) -> int:
    return int(stats["decisions"]["dropped_tokens"])


def resident(stats: Mapping[str, Any]) -> str:
    return f"{stats['cached_tokens']} in {stats['cached_slots']} slots"


def tree_picture(tree: Mapping[str, Any], context_tokens: int, num_shown: int = 8) -> str:
    """The most used contexts of `/evicpress/tree`; each bar shows the slots left of the tokens."""
    nodes = tree["nodes"]
    contexts = [node for node in nodes if node["num_tokens"] >= _CONTEXT_SHARE * context_tokens]
    contexts.sort(key=lambda node: (-node["weight"], node["id"]))
    num_others = len(nodes) - len(contexts)
    lines = [f"root: {len(contexts)} contexts resident, {num_others} nodes of questions and answers"]
    shown = contexts[:num_shown]
    for node in shown:
        filled = round(_BAR_WIDTH * node["num_slots"] / node["num_tokens"])
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        branch = "`-" if node is shown[-1] and len(shown) == len(contexts) else "|-"
        lines.append(
            f"{branch} node {node['id']:<5} {node['form']:<12} [{bar}] {node['num_tokens']} tokens in "
            f"{node['num_slots']} slots, used {node['weight']:.0f} x, {len(node['children'])} children"
        )
    if len(shown) < len(contexts):
        lines.append(f"`- and {len(contexts) - len(shown)} more")
    return "\n".join(lines)
