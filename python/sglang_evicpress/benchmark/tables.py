"""The report of a benchmark: its settings, a table for each rate, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from sglang_evicpress.benchmark.curves import best_at_quality, capacity, curve, gaps, unloaded_p95
from sglang_evicpress.benchmark.load import loaded
from sglang_evicpress.benchmark.load_tables import load_lines
from sglang_evicpress.benchmark.ratios import Paired
from sglang_evicpress.benchmark.results import TIERS, Results, read_results
from sglang_evicpress.benchmark.summary import QUALITIES, Cell, Summary, summarise
from sglang_evicpress.files import write_whole
from sglang_evicpress.quantiles import quantile
from sglang_evicpress.tables import markdown, ms, number, share

TABLES, SUMMARY = "tables.md", "summary.json"
LEAST_QUALITY = 0.8
"""Below this, an answer is not worth its speed: the paper's figure 8 leaves out what is below."""

BASELINES = ("prefill-only", "lru", "hicache", "tiers-lru", "fixed", "adaptcache", "impress")
OURS = ("evicpress",)


def write_report(folder: Path) -> Summary:
    """Write ``tables.md`` and ``summary.json`` of an out folder. Raises ValueError as ``read_results`` does."""
    results = read_results(folder)
    summary = summarise(results)
    families = [summarise(results, family) for family in results.families] if len(results.families) > 1 else []
    everything = orjson.dumps(_everything(summary, families), option=orjson.OPT_INDENT_2)
    write_whole(str(folder / TABLES), "\n".join([*report_lines(summary), ""]).encode())
    write_whole(str(folder / SUMMARY), everything + b"\n")
    return summary


def report_lines(summary: Summary) -> Iterator[str]:
    """Markdown."""
    results = summary.results
    yield f"# {results.plan.get('config', {}).get('name') or results.run_dir.name}"
    yield ""
    yield from (f"- {line}" for line in setting_lines(results))
    if summary.overhead_s is not None:
        yield f"- fixed overhead: {ms(summary.overhead_s)} ms, the median TTFT of the faster full cache with one client"
    if any(cell.work.utility_lost_s is not None for cell in summary.cells):
        yield (
            "- utility lost: what EvicPress's decisions gave up by its own estimate: alpha * quality - delay, in "
            "seconds, times the uses expected; with another alpha it has another scale"
        )
    yield from (f"- **note:** {note}" for note in summary.notes)
    for rate in results.rates:
        yield from ("", f"## {rate_label(rate)}", "")
        yield from markdown(_LATENCY_HEAD, [_latency_row(cell, summary) for cell in summary.at(rate)])
        yield ""
        yield from markdown(_CACHE_HEAD, [_cache_row(cell) for cell in summary.at(rate)])
        if rows := list(_equal_quality_rows(summary, rate)):
            yield ""
            yield from markdown(_EQUAL_HEAD, rows)
    if rows := list(_capacity_rows(summary)):
        yield from ("", f"## Requests/s that are sustained at F1 with the full cache of {LEAST_QUALITY:g} and more", "")
        yield from markdown(_CAPACITY_HEAD, rows)
    yield from load_lines(results)


def setting_lines(results: Results) -> Iterator[str]:
    """Under every table and figure: contexts, memory, bandwidths, versions and commit."""
    config, settings, environment = (results.plan.get(name) or {} for name in ("config", "settings", "environment"))
    memory = config.get("memory") or {}
    longest = config.get("tokens")
    yield (
        f"{_told(settings.get('num_contexts'))} contexts, {_told(settings.get('working_set_tokens'))} tokens in all"
        f"{'' if longest is None else f', at most {longest} each'}; {_told(config.get('requests'))} requests a rate, "
        f"{_told(config.get('repetitions'))} repetitions, arrivals {_told(settings.get('arrivals'))}, at most "
        f"{_told(config.get('max_new_tokens'))} new tokens, model {_told(config.get('model'))}"
    )
    if results.multiples:
        load = config["load"]
        extra_rates = ", ".join(f"{multiple:g} x = {rate:g}/s" for rate, multiple in results.multiples.items())
        yield (
            f"saturation {load['saturation_rps']:.2f} requests/s, of {_told(load.get('reference'))} with "
            f"{_told(load.get('clients'))} clients; rates of {load['seconds']:g} s at {extra_rates}, cut "
            f"{_told(load.get('cut_s'))} s later"
        )
    yield (
        f"GPU pool {_told(settings.get('pool_tokens'))} tokens{_percent(memory.get('gpu'))}, host "
        f"{_bytes(settings.get('host_bytes'))}{_percent(memory.get('host'))}, SSD {_bytes(settings.get('ssd_bytes'))}"
        f"{_percent(memory.get('ssd'))} of the working set; {_told(settings.get('kv_bytes_per_token'))} bytes a token; "
        f"{_bandwidths(results)}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in (environment.get("versions") or {}).items())
    yield (
        f"{versions or 'versions unknown'}; commit {_told(environment.get('commit'))}; "
        f"{_told(environment.get('machine'))}, {_told(environment.get('num_cpus'))} CPUs; started "
        f"{_told(environment.get('started'))}"
    )
    if cores := results.tree_cores:
        yield f"SGLang's radix tree: {', '.join(f'{system} on its {core} core' for system, core in cores.items())}"
    command = environment.get("command")
    yield f"`{command if isinstance(command, str) else ' '.join(command or ['command unknown'])}`"


def rate_label(rate: float) -> str:
    return f"{rate:g} requests/s" if rate else "One client, the next request after each answer"


def times(found: Paired | None) -> str:
    """A ratio with its interval."""
    return "-" if found is None else f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


_LATENCY_HEAD = (
    *("system", "TTFT mean, ms", "p50", "p95", "of the full cache's (95 %)", "without overhead", "overhead in TTFT"),
    *("ITL mean, ms", "p95", "end-to-end mean, ms", "p95", "requests/s", "refused", "failed"),
    *("F1 with the full cache", "minilm", "F1 with the truth"),
)


def _latency_row(cell: Cell, summary: Summary) -> list[str]:
    overhead = summary.overhead_s
    part = None if overhead is None or not cell.ttft.mean_s else min(1.0, overhead / cell.ttft.mean_s)
    return [
        cell.system,
        *(ms(value) for value in (cell.ttft.mean_s, cell.ttft.p50_s, cell.ttft.p95_s)),
        times(cell.over_full_cache),
        number(None if cell.over_full_cache_net is None else cell.over_full_cache_net.ratio, 2),
        share(part),
        *(ms(value) for value in (cell.itl.mean_s, cell.itl.p95_s, cell.latency.mean_s, cell.latency.p95_s)),
        number(cell.completed_rps, 2),
        *(f"{count} of {cell.num_requests}" for count in (cell.num_refused, cell.num_failed)),
        *(number(cell.quality(measure)) for measure in QUALITIES),
    ]


_CACHE_HEAD = (
    *("system", "prompt tokens cached", *(f"by {tier}" for tier in TIERS)),
    *(f"{tier}, MB" for tier in TIERS),
    *("utility lost per request", "tokens by form, where resident", "decisions in the runs"),
)


def _cache_row(cell: Cell) -> list[str]:
    hits, held = cell.held.hits or {}, cell.held.tier_bytes or {}
    forms: dict[str, float] = {}
    for kept in (cell.held.forms or {}).values():
        for form, tokens in kept.items():
            forms[form] = forms.get(form, 0.0) + tokens
    total = sum(forms.values())
    largest = sorted(forms.items(), key=lambda item: -item[1])
    return [
        cell.system,
        share(cell.held.hit_share),
        *(share(hits.get(tier)) for tier in TIERS),
        *(number(held[tier] / 1e6, 1) if tier in held else "-" for tier in TIERS),
        number(cell.work.utility_lost_s, 4),
        ", ".join(f"{form} {100 * tokens / total:.0f} %" for form, tokens in largest if tokens) or "-",
        ", ".join(f"{name} {count:.0f}" for name, count in (cell.work.decisions or {}).items() if count) or "-",
    ]


_EQUAL_HEAD = (
    *("EvicPress against", "at the same F1 with the full cache", "TTFT lower by, at best", "at worst"),
    *("without overhead, at best", "at worst", "within 3 % of its best quality: TTFT lower by"),
)


def _equal_quality_rows(summary: Summary, rate: float) -> Iterator[list[str]]:
    ours = curve(summary, OURS, rate)
    for kind in BASELINES:
        theirs = curve(summary, (kind,), rate)
        if not ours.points or not theirs.points:
            continue
        found = gaps(ours, theirs)
        net = [gap.net_ratio(summary.overhead_s) for gap in found] if summary.overhead_s is not None else []
        known = [ratio for ratio in net if ratio is not None]
        yield [
            kind,
            f"{found[0].quality:.3f} to {found[-1].quality:.3f}" if found else "no quality in common",
            f"{max(gap.ratio for gap in found):.2f}x" if found else "-",
            f"{min(gap.ratio for gap in found):.2f}x" if found else "-",
            f"{max(known):.2f}x" if known else "-",
            f"{min(known):.2f}x" if known else "-",
            _within_3_percent(summary, kind, rate),
        ]


def _within_3_percent(summary: Summary, kind: str, rate: float) -> str:
    """The fastest setting of ours that is as good but for 3 %, against the fastest of theirs that is as good."""
    best = max((point.quality for point in curve(summary, (kind,), rate).points), default=None)
    if best is None:
        return "-"
    one = best_at_quality(summary, OURS, rate, 0.97 * best)
    other = best_at_quality(summary, (kind,), rate, 0.97 * best)
    if one is None or other is None or not one.ttft.mean_s or other.ttft.mean_s is None:
        return "-"
    return f"{other.ttft.mean_s / one.ttft.mean_s:.2f}x ({one.system} against {other.system})"


_CAPACITY_HEAD = ("system", "TTFT p95 within 2x the full cache's with one client", "within 2x its own")


def _capacity_rows(summary: Summary) -> Iterator[list[str]]:
    for system in summary.results.systems:
        row = sustained(summary, system["name"])
        if row != ["-", "-"]:
            yield [system["name"], *row]


def sustained(summary: Summary, system: str, measure: str = "f1_full_cache") -> list[str]:
    """Requests/s of a system with a 95th percentile of TTFT of at most twice the full cache's with one client, and of
    at most twice its own."""
    row = []
    for unloaded in (summary.results.full_cache, system):
        limit = None if unloaded is None else unloaded_p95(summary, unloaded)
        found = None if limit is None else capacity(summary, system, 2 * limit, least=LEAST_QUALITY, measure=measure)
        row.append("-" if found is None else f"{'>= ' if found.is_at_least else ''}{found.rps:.2f}")
    return row


def _everything(summary: Summary, families: Sequence[Summary]) -> Mapping[str, Any]:
    plan = summary.results.plan
    return {
        **{name: plan.get(name) for name in ("config", "settings", "environment", "systems", "left_out")},
        "notes": summary.notes,
        "overhead_s": summary.overhead_s,
        "cells": [cell.record() for cell in summary.cells],
        "load": [each.record() for each in loaded(summary.results)],
        "families": {each.family: [cell.record() for cell in each.cells] for each in families},
    }


def _told(value: object) -> str:
    return "?" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f" ({100 * value:g} %)"


def _bytes(value: float | None) -> str:
    return "?" if value is None else f"{value / 1e6:.0f} MB" if value < 1e9 else f"{value / 1e9:.1f} GB"


def _bandwidths(results: Results) -> str:
    limit = results.plan.get("config", {}).get("ssd_bandwidth")
    seen: dict[str, list[float]] = {}
    for run in results.runs:
        for tier, told in ((run.header.get("tiers") or {}).get("tiers") or {}).items():
            if told.get("load"):
                seen.setdefault(tier, []).append(told["load"]["bytes_per_s"])
    parts = [f"{tier} {_bytes(quantile(found, 0.5))}/s" for tier, found in seen.items()]
    first = "SSD reads not slowed" if limit is None else f"SSD reads slowed to {_bytes(limit)}/s"
    return f"{first}{'; loads seen: ' + ', '.join(parts) if parts else ''}"
