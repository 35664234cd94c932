"""Promises of serving judged by the runs of bench/configs/show.yaml.

TTFT is compared at rate 0, one client that waits for each answer, so that no queue is in it; requests/s by the rates
above. Quality is that of an answer beside the full cache's on the same request: by MiniLM, as in the paper, and,
stricter, by token F1. A setting of EvicPress is chosen by what it is compared for, as a user would choose alpha.

Stock SGLang's attention on the CPU is slow on cached prefixes, and ours replaces it. What that alone gains is no merit
of the cache: where a stock system is compared with, the promise must hold beside it with our attention too.
"""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.report import Line
from evicbench.serving.runs import draw, folder_of, serve
from sglang_evicpress.benchmark.curves import best_at_quality, capacity, curve, gaps, unloaded_p95
from sglang_evicpress.benchmark.ratios import Paired, paired
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import Cell, Summary, summarise
from sglang_evicpress.benchmark.tables import setting_lines, write_report
from sglang_evicpress.tables import number

CONFIG = "show"
FIGURES = ("ttft_quality", "rates", "hits", "forms", "adaptcache")
OURS = ("evicpress",)
MEASURES = {"minilm_full_cache": "MiniLM", "f1_full_cache": "token F1"}
STOCK = ("lru", "prefill-only")
FAST = ("gpu", "host")
LEAST = 0.97
"""Of the full cache's quality: what "within 3 %" means, as exact answers have 1."""


def measure() -> Iterator[Line]:
    serve(CONFIG)
    write_report(folder_of(CONFIG))
    draw(CONFIG, FIGURES)
    summary = summarise(read_results(folder_of(CONFIG)))
    for line in setting_lines(summary.results):
        print(f"    {line}", flush=True)
    yield from targets(summary)


def targets(summary: Summary) -> Iterator[Line]:
    for measure in MEASURES:
        yield against_fixed(summary, measure)
    for kind, least in (("lru", 2.0), ("tiers-lru", 1.5), ("prefill-only", 3.0)):
        yield against_exact(summary, kind, least)
    yield requests_per_second(summary)
    yield fast_hits(summary)
    yield against_full_cache(summary)
    yield overhead_share(summary)


def against_fixed(summary: Summary, measure: str) -> Line:
    """EvicPress at its alphas beside the best of all fixed presses at the same quality."""
    ours, theirs = curve(summary, OURS, 0.0, measure), curve(summary, ("fixed",), 0.0, measure)
    found = gaps(ours, theirs)
    best = max(found, key=lambda gap: gap.ratio, default=None)
    worst = min(found, key=lambda gap: gap.ratio, default=None)
    if best is None or worst is None:
        figure = "no quality that both reach"
    else:
        net = best.net_ratio(summary.overhead_s or 0.0)
        figure = (
            f"{best.ratio:.2f}x lower at {best.quality:.3f} ({_ms(best.ttft_s)} against {_ms(best.other_ttft_s)}"
            f"{'' if net is None else f'; without fixed overhead {net:.2f}x'}), at worst {1 / worst.ratio - 1:+.0%} at "
            f"{worst.quality:.3f}, over {len(found)} qualities from {found[0].quality:.3f} to {found[-1].quality:.3f}; "
            f"best qualities {max(point.quality for point in ours.points):.3f} and "
            f"{max(point.quality for point in theirs.points):.3f}"
        )
    ok = best is not None and worst is not None and best.ratio >= 2.0 and worst.ratio >= 1 / 1.05
    return Line(
        f"mean TTFT beside the best fixed press + LRU at equal quality ({MEASURES[measure]}), all alphas and fractions",
        ">= 2x lower somewhere, never more than 5 % higher",
        figure,
        ok,
    )


def against_exact(summary: Summary, kind: str, least: float) -> Line:
    """The fastest setting of ours within 3 % of exact answers, by the stricter measure."""
    what = f"mean TTFT beside {_NAMES[kind]}, quality within 3 %"
    one = best_at_quality(summary, OURS, 0.0, LEAST)
    found = None if one is None else _over(summary, kind, one)
    if one is None or found is None:
        return Line(what, f">= {least:g}x lower", f"no setting of EvicPress reaches {LEAST}", False)
    figure = f"{_times(found)} ({_told(one)}, {kind} {_ms(_ttft(summary, kind))}"
    if kind not in STOCK:
        figure += f"; without fixed overhead {_times(_over(summary, kind, one, summary.overhead_s or 0.0))}"
    control = _over(summary, f"{kind}+attention", one)
    if control is not None:
        net = _over(summary, f"{kind}+attention", one, summary.overhead_s or 0.0)
        figure += f"; beside {kind} with our CPU attention {_times(control)}, without fixed overhead {_times(net)}"
    ok = found.ratio >= least and (control is None or control.ratio >= least)
    return Line(what, f">= {least:g}x lower", figure + ")", ok)


def requests_per_second(summary: Summary) -> Line:
    """At one limit for all: twice the 95th percentile of TTFT that exact answers without a cache have unloaded. The
    stock systems have our attention."""
    limit_s = 2 * (unloaded_p95(summary, "prefill-only+attention") or 0.0)
    extra_rates = {}
    for system in summary.results.systems:
        rates = [cell.rate for cell in summary.of(system["name"]) if cell.rate > 0]
        found = capacity(summary, system["name"], limit_s) if rates else None
        if found is not None:
            extra_rates[system["name"]] = found
    ours = max((found.rps for name, found in extra_rates.items() if name.startswith("evicpress")), default=0.0)
    theirs = max((found.rps for name, found in extra_rates.items() if not name.startswith("evicpress")), default=0.0)
    told = ", ".join(
        f"{name} {'>= ' if found.is_at_least else ''}{found.rps:.1f}" for name, found in extra_rates.items()
    )
    return Line(
        f"requests/s at TTFT p95 <= {_ms(limit_s)}, twice that of prefill only unloaded, and token F1 >= 0.8",
        ">= 2.5x the best baseline",
        f"{ours / theirs if theirs else float('inf'):.2f}x: {told}",
        theirs > 0 and ours >= 2.5 * theirs,
    )


def fast_hits(summary: Summary) -> Line:
    """Share of prompt tokens found on the GPU or in host memory; beside the fixed press that is nearest in TTFT
    among those as good."""
    what = f"share of prompt tokens hit on the GPU or in host memory, token F1 >= {LEAST}"
    one = best_at_quality(summary, OURS, 0.0, LEAST)
    other = best_at_quality(summary, ("fixed",), 0.0, LEAST)
    exact = summary.cell("tiers-lru", 0.0)
    if one is None or other is None or exact is None:
        return Line(what, ">= 2x fixed press + LRU", f"no setting of both reaches {LEAST}", False)
    ours, theirs, lru = (_fast(cell) for cell in (one, other, exact))
    return Line(
        what,
        ">= 2x fixed press + LRU",
        f"{ours / theirs if theirs else float('inf'):.2f}x: {one.system} {ours:.0%}, {other.system} {theirs:.0%}; "
        f"exact LRU over the same tiers {lru:.0%}",
        theirs > 0 and ours >= 2 * theirs,
    )


def against_full_cache(summary: Summary) -> Line:
    what = f"mean TTFT beside the full cache, infinite memory; token F1 >= {LEAST}"
    one = best_at_quality(summary, OURS, 0.0, LEAST)
    if one is None:
        return Line(what, "<= 2x", f"no setting of EvicPress reaches {LEAST}", False)
    found = paired(summary.results, one.system, "full-cache", 0.0)
    control = paired(summary.results, one.system, "full-cache+attention", 0.0)
    better = best_at_quality(summary, OURS, 0.0, 0.99)
    more = "" if better is None else f"; at {better.qualities.f1_full_cache:.3f}: {_multiple(summary, better)}"
    if found is None:
        return Line(what, "<= 2x", "the full cache did not run", False)
    figure = f"{found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f}; {_told(one)})"
    if control is not None:
        figure += f"; beside a bound with our CPU attention {control.ratio:.2f}x"
    return Line(what, "<= 2x", figure + more, found.ratio <= 2.0 and (control is None or control.ratio <= 2.0))


def overhead_share(summary: Summary) -> Line:
    """Share of fixed overhead, which no cache can take away, so what the ratios above are diluted by."""
    overhead_s = summary.overhead_s or 0.0
    shares = [
        f"{cell.system} {overhead_s / cell.ttft.mean_s:.0%}"
        for cell in summary.at(0.0)
        if cell.kind in ("lru+attention", "tiers-lru", "evicpress") and cell.ttft.mean_s
    ]
    return Line(
        "share of mean TTFT that is fixed overhead, the median TTFT of the faster full cache, one client",
        "reported",
        f"{_ms(overhead_s)}: {', '.join(shares)}",
        bool(shares) and overhead_s > 0,
    )


_NAMES = {
    "lru": "stock SGLang (drop by LRU and recompute)",
    "tiers-lru": "exact LRU over the same tiers (eviction only)",
    "prefill-only": "prefill only",
}


def _over(summary: Summary, kind: str, one: Cell, overhead_s: float = 0.0) -> Paired | None:
    return paired(summary.results, kind, one.system, 0.0, overhead_s=overhead_s)


def _times(found: Paired | None) -> str:
    return "none" if found is None else f"{found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f})"


def _multiple(summary: Summary, cell: Cell) -> str:
    found = paired(summary.results, cell.system, "full-cache", 0.0)
    return "none" if found is None else f"{found.ratio:.2f}x ({cell.system})"


def _told(cell: Cell) -> str:
    f1, minilm = (number(cell.quality(measure)) for measure in ("f1_full_cache", "minilm_full_cache"))
    return f"{cell.system}: {_ms(cell.ttft.mean_s)}, token F1 {f1}, MiniLM {minilm}"


def _ttft(summary: Summary, system: str) -> float | None:
    cell = summary.cell(system, 0.0)
    return None if cell is None else cell.ttft.mean_s


def _fast(cell: Cell) -> float:
    return sum((cell.held.hits or {}).get(tier, 0.0) for tier in FAST)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:.0f} ms"
