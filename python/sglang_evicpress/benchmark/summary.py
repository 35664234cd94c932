"""Results of every system at every rate, over all repetitions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_evicpress.benchmark.ratios import Paired, paired
from sglang_evicpress.benchmark.results import MOST_FAILED, TIERS, Request, Results, Run
from sglang_evicpress.quantiles import quantile

QUALITIES = ("f1_full_cache", "minilm_full_cache", "f1_truth")
"""Measures of quality: token F1 and cosine with the full cache's answer, token F1 with the true one."""

FULL_CACHES = ("full-cache", "full-cache+attention")

NEW, NOT_WORTH, DROPPED = "new", "not_worth", "dropped"
"""Reasons to compute a token of a prompt that the server tells apart: it was in no tier; loading it would have taken
longer; it was dropped although a lower tier had room. By every other reason it was held."""


@dataclass(frozen=True, slots=True)
class Times:
    """Mean and percentiles of some seconds; None without any."""

    mean_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        return cls(_mean(values), *(known_quantile(values, share) for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Qualities:
    """Mean scores by each of ``QUALITIES``."""

    f1_full_cache: float | None = None
    minilm_full_cache: float | None = None
    f1_truth: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Content of the cache. ``hit_share`` is of the prompts' tokens, and ``hits`` the same by tier. ``tier_bytes`` (by
    tier) and ``forms`` (tier -> form -> tokens) are the means of what was there after the runs."""

    hit_share: float | None = None
    hits: Mapping[str, float] | None = None
    tier_bytes: Mapping[str, float] | None = None
    forms: Mapping[str, Mapping[str, float]] | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Sums of what a server counts, in the runs; None where it does not say.

    ``utility_lost_s`` is what its decisions gave up by EvicPress's own estimate, per request: alpha times quality less
    delay, in seconds, times the uses expected. ``computed`` are shares of the admitted prompts' tokens, by reason;
    ``not_worth_s`` the seconds predicted, and those it took, for tokens that were not worth loading.
    """

    decisions: Mapping[str, float] | None = None
    utility_lost_s: float | None = None
    computed: Mapping[str, float] | None = None
    not_worth_s: Mapping[str, float] | None = None
    evictions: Mapping[str, float] | None = None
    drops: Mapping[str, float] | None = None

    def computed_for(self, reason: str) -> float | None:
        """The share of the prompts' tokens computed for one reason."""
        return None if self.computed is None else self.computed.get(reason, 0.0)

    @property
    def recomputed(self) -> float | None:
        """The share of the prompts' tokens computed although held, but for those not worth loading."""
        if self.computed is None:
            return None
        return sum(share for reason, share in self.computed.items() if reason not in (NEW, NOT_WORTH, DROPPED))


@dataclass(frozen=True, slots=True)
class Cell:
    """One system at one rate, in one ``repetition`` or, where that is None, in all.

    Times are those of complete requests, so of none refused, except ``ttft_p95_of_all_s``, for which any other lasts
    for ever; None is what could not be measured. A request that was cut counts with the TTFT it had, or the time it had
    waited for it, so that TTFT cannot look short because a queue was cut. Rates of a run that ends at a set time are
    those while requests arrived: ``completed_rps`` counts the answers, ``goodput_rps`` those whose TTFT was within the
    config's limit; one client offers nothing. ``over_full_cache`` compares TTFT with the full cache's,
    ``over_full_cache_net`` without the fixed overhead of both; neither is known of one repetition.
    """

    system: str
    kind: str
    rate: float
    num_repetitions: int
    num_requests: int
    num_failed: int
    num_cut: int = 0
    num_refused: int = 0
    repetition: int | None = None
    offered_rps: float | None = None
    completed_rps: float | None = None
    goodput_rps: float | None = None
    late_p95_s: float | None = None
    ttft: Times = Times()
    ttft_p95_of_all_s: float | None = None
    itl: Times = Times()
    latency: Times = Times()
    qualities: Qualities = Qualities()
    held: Held = Held()
    work: Work = Work()
    over_full_cache: Paired | None = None
    over_full_cache_net: Paired | None = None

    def quality(self, measure: str) -> float | None:
        """``measure`` is one of ``QUALITIES``. Raises ValueError for another."""
        if measure not in QUALITIES:
            raise ValueError(f"quality {measure!r:.60} is not measured: expected one of {', '.join(QUALITIES)}")
        value: float | None = getattr(self.qualities, measure)
        return value

    @property
    def is_comparable(self) -> bool:
        return self.ttft.mean_s is not None and self.num_failed + self.num_refused <= MOST_FAILED * self.num_requests

    def record(self) -> dict[str, Any]:
        """All figures by one name each, for ``summary.json``."""
        told = asdict(self)
        for name in ("ttft", "itl", "latency"):
            told |= {f"{name}_{key}": value for key, value in told.pop(name).items()}
        for name in ("qualities", "held", "work"):
            told |= told.pop(name)
        return told


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

    def at(self, rate: float) -> list[Cell]:
        return [cell for cell in self.cells if cell.rate == rate]

    def of(self, system: str) -> list[Cell]:
        """By rate."""
        return sorted((cell for cell in self.cells if cell.system == system), key=lambda cell: cell.rate)

    def cell(self, system: str, rate: float) -> Cell | None:
        return next((cell for cell in self.cells if (cell.system, cell.rate) == (system, rate)), None)


def summarise(results: Results, family: str | None = None, repetition: int | None = None) -> Summary:
    """Summary of all requests, or of those about contexts of one ``family``, or in one ``repetition``."""
    overhead_s = _overhead(results)
    cells = [
        _cell(results, system, rate, runs, family, repetition, overhead_s)
        for system in results.systems
        for rate in results.rates
        if (runs := [each for each in results.runs_of(system["name"], rate) if repetition in (None, each.repetition)])
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
    repetition: int | None,
    overhead_s: float | None,
) -> Cell:
    name, limit_s = system["name"], results.plan.get("config", {}).get("ttft_limit_s")
    asked = [(run, request) for run in runs for request in run.requests.values() if family in (None, request.family)]
    requests = [request for _, request in asked]
    complete = [request for request in requests if request.is_complete]
    answered = [request.ttft_s for request in complete if request.ttft_s is not None]
    waited = [request.waited_s for request in requests if request.waited_s is not None]
    scores = [results.scores.get((name, run.repetition, rate, request.index)) for run, request in asked]
    known = [score for score in scores if score is not None]
    window_s = sum(run.header.get("seconds") or 0.0 for run in runs)
    took_s = window_s or sum(run.header.get("took_s") or 0.0 for run in runs)
    # Where requests arrive for a set time, those that ended within it.
    ended = [request for run, request in asked if request.end_s <= (run.header.get("seconds") or float("inf"))]
    in_time = [request for request in ended if request.is_complete]
    good = [request for request in in_time if limit_s is not None and (request.ttft_s or 0.0) <= limit_s]
    num_prompt_tokens = sum(request.prompt_tokens for request in complete)
    num_cached_tokens = sum(request.cached_tokens for request in complete)
    computed, not_worth_s = _admission(runs)
    over, over_net = None, None
    if results.full_cache is not None and repetition is None:
        over = paired(results, name, results.full_cache, rate, family=family)
        if overhead_s is not None:
            over_net = paired(results, name, results.full_cache, rate, family=family, overhead_s=overhead_s)
    return Cell(
        system=name,
        kind=system["kind"],
        rate=rate,
        num_repetitions=len(runs),
        num_requests=len(asked),
        num_failed=sum(request.has_failed for request in requests),
        num_cut=sum(request.is_cut for request in requests),
        num_refused=sum(request.is_refused for request in requests),
        repetition=repetition,
        offered_rps=(len(asked) / window_s if window_s else rate) if rate else None,
        completed_rps=len(in_time) / took_s if took_s else None,
        goodput_rps=len(good) / took_s if took_s and limit_s is not None else None,
        late_p95_s=known_quantile([request.late_s for request in requests], 0.95),
        ttft=Times.of([*answered, *waited]),
        ttft_p95_of_all_s=known_quantile([*answered, *[float("inf")] * (len(asked) - len(answered))], 0.95),
        itl=Times.of([gap for request in complete for gap in request.itl_s]),
        latency=Times.of([request.latency_s for request in complete if request.latency_s is not None]),
        qualities=Qualities(*(_mean([getattr(score, measure) for score in known]) for measure in QUALITIES)),
        held=Held(
            num_cached_tokens / num_prompt_tokens if num_prompt_tokens else None,
            _hits(complete, num_prompt_tokens),
            _mean_of_maps([_tier_bytes(run, results) for run in runs]),
            _forms(runs),
        ),
        work=Work(
            _growth(runs, "decisions"),
            _utility_lost(runs),
            computed,
            not_worth_s,
            _growth(runs, "evictions"),
            _growth(runs, "drops"),
        ),
        over_full_cache=over,
        over_full_cache_net=over_net,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def known_quantile(values: Sequence[float], share: float) -> float | None:
    """None without a value."""
    return quantile(values, share) if values else None


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


def _admission(runs: Sequence[Run]) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """Shares of the tokens of admitted prompts that were computed, by reason, and the seconds of those not worth it."""
    found = _growth(runs, "admission")
    if found is None or found.get("prompt_tokens", 0.0) <= 0:
        return None, None
    parts: dict[str, dict[str, float]] = {}
    for name, value in found.items():
        part, _, rest = name.partition(" ")
        parts.setdefault(part, {})[rest] = value
    computed = {reason: tokens / found["prompt_tokens"] for reason, tokens in parts.get("computed_tokens", {}).items()}
    return computed, parts.get("not_worth_s")


def _growth(runs: Sequence[Run], name: str) -> dict[str, float] | None:
    """Growth of each number below one name of the servers' statistics, in the runs; None where there is none."""
    total: dict[str, float] = {}
    for run in runs:
        before, after = ((run.header.get(when) or {}).get(name) or {} for when in ("stats_before", "stats"))
        started = dict(numbers(before))
        for key, value in numbers(after):
            total[key] = total.get(key, 0.0) + value - started.get(key, 0.0)
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
        names = {system["name"], system["kind"]}
        repetitions = 1 if names & {*once} else wanted
        rates = config.get("rates") or ()
        for rate in rates:
            missing += max(0, repetitions - len(results.runs_of(system["name"], rate)))
        extra = [each for each in config.get("extra_rates") or () if names & {*each["systems"]}]
        for rate in {rate for each in extra for rate in each["rates"]} - {*rates}:  # in the first repetition
            missing += not results.runs_of(system["name"], rate)
    if missing:
        yield f"{missing} runs of the plan are missing"
    for left in results.plan.get("left_out") or ():
        yield f"{left['name']} was left out: {left['why']}"
    is_slowed = config.get("ssd_bandwidth") is not None and bool((config.get("memory") or {}).get("ssd"))
    if is_slowed and any(system["kind"] == "hicache" for system in results.systems):
        yield "hicache read its SSD at full speed: ssd_bandwidth slows the reads of EvicPress's tiers only"
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
    for system in results.systems:
        for repetition, starts in sorted(_starts(results, system["name"]).items()):
            if len(starts) > 1:
                yield (
                    f"{system['name']}, repetition {repetition + 1}: its rates ran on {len(starts)} starts of the "
                    f"server, each warmed up anew"
                )
    commits = sorted({run.header["commit"] for run in results.runs if run.header.get("commit")})
    if len(commits) > 1:
        yield f"the runs are of several commits: {', '.join(commits)}"
    yield from _other_places(results)
    if not results.scores:
        yield "the answers were not scored"
    elif all(score.minilm_full_cache is None for score in results.scores.values()):
        yield "minilm was not measured: it needs sglang-evicpress[quality]"
    for cell in (cell for cell in cells if not cell.is_comparable):
        at = f"of {cell.num_requests} requests at rate {cell.rate:g}"
        if cell.num_failed:
            yield f"{cell.system} failed {cell.num_failed} {at}"
        if cell.num_refused:
            yield f"{cell.system} refused {cell.num_refused} {at}: its times are those of the others, and not compared"
    late = max((cell.late_p95_s or 0.0 for cell in cells), default=0.0)
    if late > 0.05:
        yield f"the client was late: its 95th percentile reaches {1e3 * late:.0f} ms after the planned arrivals"


def _starts(results: Results, system: str) -> dict[int, set[str | None]]:
    """Repetition -> ids of the starts of a system's server that its rates ran on; None for runs that name none."""
    starts: dict[int, set[str | None]] = {}
    for run in results.runs:
        if run.system == system:
            starts.setdefault(run.repetition, set()).add(run.header.get("start_id"))
    return starts


def _other_places(results: Results) -> Iterator[str]:
    """A note for versions, and one for machines, where runs differ in them; runs that name none are of the plan's."""
    first = results.plan.get("environment") or {}
    places = [run.header if "versions" in run.header else first for run in results.runs]
    for name in dict.fromkeys(name for place in places for name in place.get("versions") or ()):
        versions = sorted({place["versions"][name] for place in places if name in (place.get("versions") or ())})
        if len(versions) > 1:
            yield f"the runs are of several versions of {name}: {', '.join(versions)}"
    machines = sorted({f"{place['machine']}, {place.get('num_cpus')} CPUs" for place in places if "machine" in place})
    if len(machines) > 1:
        yield f"the runs are of several machines: {' / '.join(machines)}"


def _is_broken(check: object) -> bool:
    ok = check.get("ok") if isinstance(check, Mapping) else check
    return ok is False
