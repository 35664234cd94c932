"""Results of every system at every rate, over all repetitions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_evicpress.benchmark.ratios import Paired, paired
from sglang_evicpress.benchmark.results import TIERS, Request, Results, Run
from sglang_evicpress.quantiles import quantile

QUALITIES = ("f1_full_cache", "minilm_full_cache", "f1_truth")
"""Measures of quality: token F1 and cosine with the full cache's answer, token F1 with the true one."""

FULL_CACHES = ("full-cache", "full-cache+attention")
MOST_FAILED = 0.01
"""A system that fails more of its requests than this share is not compared: those left may be the easy ones."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One system at one rate. Times are those of complete requests, except ``ttft_p95_of_all_s``, for which any other
    lasts for ever; None is what could not be measured. A request that was cut counts with the TTFT it had, or the time
    it had waited for it, so that TTFT cannot look short because a queue was cut. ``completed_rps`` of a rate that ends
    at a set time are the answers complete while requests arrived, over that time.

    ``hit_share`` is of the prompts' tokens, and ``hits`` the same by tier. ``tier_bytes`` (by tier) and ``forms``
    (tier -> form -> tokens) are the means of what was there after the runs; ``decisions`` are sums of those taken in
    them. ``utility_lost_s`` is what these gave up by EvicPress's own estimate, per request: alpha times quality less
    delay, in seconds, times the uses expected; None for a policy that does not weigh that. ``over_full_cache`` compares
    TTFT with the full cache's, ``over_full_cache_net`` without the fixed overhead of both.
    """

    system: str
    kind: str
    rate: float
    num_repetitions: int
    num_requests: int
    num_failed: int
    num_cut: int = 0
    num_refused: int = 0
    completed_rps: float | None = None
    late_p95_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p95_of_all_s: float | None = None
    itl_mean_s: float | None = None
    itl_p95_s: float | None = None
    latency_mean_s: float | None = None
    latency_p95_s: float | None = None
    f1_full_cache: float | None = None
    minilm_full_cache: float | None = None
    f1_truth: float | None = None
    hit_share: float | None = None
    hits: Mapping[str, float] | None = None
    tier_bytes: Mapping[str, float] | None = None
    forms: Mapping[str, Mapping[str, float]] | None = None
    decisions: Mapping[str, float] | None = None
    utility_lost_s: float | None = None
    over_full_cache: Paired | None = None
    over_full_cache_net: Paired | None = None

    def quality(self, measure: str) -> float | None:
        """``measure`` is one of ``QUALITIES``. Raises ValueError for another."""
        if measure not in QUALITIES:
            raise ValueError(f"quality {measure!r:.60} is not measured: expected one of {', '.join(QUALITIES)}")
        value: float | None = getattr(self, measure)
        return value

    @property
    def is_comparable(self) -> bool:
        return self.ttft_mean_s is not None and self.num_failed <= MOST_FAILED * self.num_requests


@dataclass(frozen=True, slots=True)
class Summary:
    """All cells, in the plan's order of systems. ``overhead_s`` is the full cache's median TTFT at rate 0, where
    everything is cached and nothing else runs: what no cache can take away. Of two bounds it is that of the faster one,
    as stock attention on the CPU computes much that it need not."""

    results: Results
    family: str | None
    overhead_s: float | None
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def rates(self) -> list[float]:
        return self.results.rates

    def at(self, rate: float) -> list[Cell]:
        return [cell for cell in self.cells if cell.rate == rate]

    def of(self, system: str) -> list[Cell]:
        """By rate."""
        return sorted((cell for cell in self.cells if cell.system == system), key=lambda cell: cell.rate)

    def cell(self, system: str, rate: float) -> Cell | None:
        return next((cell for cell in self.cells if (cell.system, cell.rate) == (system, rate)), None)


def summarise(results: Results, family: str | None = None) -> Summary:
    """Summary of all requests, or of those about contexts of one ``family``."""
    overhead_s = _overhead(results)
    cells = [
        _cell(results, system, rate, runs, family, overhead_s)
        for system in results.systems
        for rate in results.rates
        if (runs := results.runs_of(system["name"], rate))
    ]
    return Summary(results, family, overhead_s, tuple(cells), tuple(_notes(results, cells)))


def _overhead(results: Results) -> float | None:
    medians = []
    for system in results.systems:
        requests = [request for run in results.runs_of(system["name"], 0.0) for request in run.requests.values()]
        times = [request.ttft_s for request in requests if request.ttft_s is not None]
        if system["kind"] in FULL_CACHES and times:
            medians.append(statistics.median(times))
    return min(medians, default=None)


def _cell(
    results: Results,
    system: Mapping[str, Any],
    rate: float,
    runs: Sequence[Run],
    family: str | None,
    overhead_s: float | None,
) -> Cell:
    name = system["name"]
    asked = [(run, request) for run in runs for request in run.requests.values() if family in (None, request.family)]
    complete = [request for _, request in asked if request.is_complete]
    scores = [
        score
        for run, request in asked
        if (score := results.scores.get((name, run.repetition, rate, request.index))) is not None
    ]
    cut = [request for _, request in asked if request.is_cut]
    answered = [request.ttft_s for request in complete if request.ttft_s is not None]
    ttft = [*answered, *(request.waited_s for request in cut if request.waited_s is not None)]
    latency = [request.latency_s for request in complete if request.latency_s is not None]
    itl = [gap for request in complete for gap in request.itl_s]
    took_s = sum(run.header.get("seconds") or run.header.get("took_s") or 0.0 for run in runs)
    in_time = [request for run, request in asked if request.is_complete and _is_in_window(run, request)]
    num_prompt_tokens = sum(request.prompt_tokens for request in complete)
    num_cached_tokens = sum(request.cached_tokens for request in complete)
    compared = {"results": results, "system": name, "over": results.full_cache, "rate": rate, "family": family}
    return Cell(
        system=name,
        kind=system["kind"],
        rate=rate,
        num_repetitions=len(runs),
        num_requests=len(asked),
        num_failed=sum(request.has_failed for _, request in asked),
        num_cut=len(cut),
        num_refused=sum(request.is_refused for _, request in asked),
        completed_rps=len(in_time) / took_s if took_s > 0 else None,
        late_p95_s=known_quantile([request.late_s for _, request in asked], 0.95),
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=known_quantile(ttft, 0.5),
        ttft_p95_s=known_quantile(ttft, 0.95),
        ttft_p95_of_all_s=known_quantile([*answered, *[float("inf")] * (len(asked) - len(answered))], 0.95),
        itl_mean_s=_mean(itl),
        itl_p95_s=known_quantile(itl, 0.95),
        latency_mean_s=_mean(latency),
        latency_p95_s=known_quantile(latency, 0.95),
        f1_full_cache=_mean([score.f1_full_cache for score in scores]),
        minilm_full_cache=_mean([score.minilm_full_cache for score in scores]),
        f1_truth=_mean([score.f1_truth for score in scores]),
        hit_share=num_cached_tokens / num_prompt_tokens if num_prompt_tokens else None,
        hits=_hits(complete, num_prompt_tokens),
        tier_bytes=_mean_of_maps([_tier_bytes(run, results) for run in runs]),
        forms=_forms(runs),
        decisions=_decisions(runs),
        utility_lost_s=_utility_lost(runs),
        over_full_cache=None if results.full_cache is None else paired(**compared),
        over_full_cache_net=None
        if results.full_cache is None or overhead_s is None
        else paired(**compared, overhead_s=overhead_s),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def known_quantile(values: Sequence[float], share: float) -> float | None:
    """None without a value."""
    return quantile(values, share) if values else None


def _is_in_window(run: Run, request: Request) -> bool:
    """True if it ended while requests arrived, where that is a set time."""
    seconds = run.header.get("seconds")
    return seconds is None or request.end_s <= seconds


def _hits(requests: Sequence[Request], num_prompt_tokens: int) -> dict[str, float] | None:
    """Shares of the prompts' tokens; None unless the server said of every cached token where it was."""
    if not num_prompt_tokens or any(request.hits is None and request.cached_tokens for request in requests):
        return None
    return {tier: sum((request.hits or {}).get(tier, 0) for request in requests) / num_prompt_tokens for tier in TIERS}


def _tier_bytes(run: Run, results: Results) -> dict[str, float] | None:
    """Bytes in each tier after a run; the GPU alone where the server has no other, or did not say."""
    tiers = (run.header.get("tiers") or {}).get("tiers")
    if tiers:
        return {tier: float(told["used_bytes"]) for tier, told in tiers.items()}
    stats, per_token = run.header.get("stats"), results.plan.get("settings", {}).get("kv_bytes_per_token")
    if not stats or not per_token:
        return None
    return {"gpu": float(stats["cached_slots"] * per_token)}


def _forms(runs: Sequence[Run]) -> dict[str, dict[str, float]] | None:
    told = [run.header["resident"] for run in runs if run.header.get("resident")]
    tiers = {tier for resident in told for tier in resident}
    means = {
        tier: _mean_of_maps(
            [{form: float(held["tokens"]) for form, held in resident.get(tier, {}).items()} for resident in told]
        )
        for tier in sorted(tiers)
    }
    return {tier: forms for tier, forms in means.items() if forms} or None


def _mean_of_maps(maps: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Mean per key over the maps that are not None; a missing key counts as 0."""
    known = [each for each in maps if each is not None]
    names = dict.fromkeys(name for each in known for name in each)
    return {name: sum(each.get(name, 0.0) for each in known) / len(known) for name in names} or None


def _decisions(runs: Sequence[Run]) -> dict[str, float] | None:
    total: dict[str, float] = {}
    for run in runs:
        before, after = ((run.header.get(name) or {}).get("decisions") for name in ("stats_before", "stats"))
        if before is not None and after is not None:
            started = dict(numbers(before))
            for name, count in numbers(after):
                total[name] = total.get(name, 0.0) + count - started.get(name, 0.0)
    return total or None


def _utility_lost(runs: Sequence[Run]) -> float | None:
    """Utility lost per request, over all families: a decision may cost others than who needed the memory."""
    lost_s, num_requests = 0.0, 0
    for run in runs:
        before, after = ((run.header.get(name) or {}).get("utility_lost_s") for name in ("stats_before", "stats"))
        if before is not None and after is not None:
            lost_s += after - before
            num_requests += len(run.requests)
    return lost_s / num_requests if num_requests else None


def numbers(counters: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Every number below, with the names that lead to it, separated by blanks."""
    for name, value in counters.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{above}{name} ")
        elif isinstance(value, int | float):
            yield f"{above}{name}", float(value)


def _notes(results: Results, cells: Sequence[Cell]) -> Iterator[str]:
    """Caveats that a reader must know before believing the figures."""
    config = results.plan.get("config", {})
    once, wanted, missing = config.get("once") or (), int(config.get("repetitions") or 1), 0
    for system in results.plan["systems"]:
        repetitions = 1 if {system["name"], system["kind"]} & set(once) else wanted
        for rate in config.get("rates") or ():
            missing += max(0, repetitions - len(results.runs_of(system["name"], rate)))
    if missing:
        yield f"{missing} runs of the plan are missing"
    for left in results.plan.get("left_out") or ():
        yield f"{left['name']} was left out: {left['why']}"
    if results.full_cache is None:
        yield (
            "there is no run of the full cache: nothing is compared with it, and no quality is known but that of "
            "the truth"
        )
    stock = {system["name"] for system in results.systems if system.get("is_stock")}
    unchecked = sorted(
        {run.system for run in results.runs if run.system in stock and not run.header.get("is_stock_checked")}
    )
    if unchecked:
        yield f"it was not checked that these were stock: {', '.join(unchecked)}"
    broken = sorted({run.system for run in results.runs if _is_broken(run.header.get("check"))})
    if broken:
        yield f"the cache was not in order after a run of: {', '.join(broken)}"
    commits = sorted({run.header["commit"] for run in results.runs if run.header.get("commit")})
    if len(commits) > 1:
        yield f"the runs are of several commits: {', '.join(commits)}"
    if not results.scores:
        yield "the answers were not scored"
    elif all(score.minilm_full_cache is None for score in results.scores.values()):
        yield "minilm was not measured: it needs sglang-evicpress[quality]"
    failed = [cell for cell in cells if not cell.is_comparable]
    for cell in failed:
        yield f"{cell.system} failed {cell.num_failed} of {cell.num_requests} requests at rate {cell.rate:g}"
    late = max((cell.late_p95_s or 0.0 for cell in cells), default=0.0)
    if late > 0.05:
        yield f"the client was late: its 95th percentile reaches {1e3 * late:.0f} ms after the planned arrivals"


def _is_broken(check: object) -> bool:
    ok = check.get("ok") if isinstance(check, Mapping) else check
    return ok is False
