"""Results of every system under load, per repetition: answers, goodput, TTFT, recomputed tokens by reason."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang_evicpress.benchmark.results import Results, Run
from sglang_evicpress.benchmark.summary import known_quantile, numbers

NEW, NOT_WORTH, DROPPED = "new", "not_worth", "dropped"
"""Reasons to compute a token of a prompt that the server tells apart: it was in no tier; loading it would have taken
longer; it was dropped although a lower tier had room. By every other reason it was held."""

UNLOADED = 2.0
"""At most so many times the 95th percentile of TTFT with one client."""

LEAST_ANSWERED = 0.95
"""Of the requests offered: what a system answers that keeps up."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One system at one rate in one ``repetition``; None for the median over all of them.

    Rates are per second of the time in which requests arrive: ``answers_rps`` counts the answers complete by its end,
    ``goodput_rps`` those whose TTFT was within the config's limit. With one client (rate 0) nothing is offered, and
    the time is that of the run. TTFT is that of answers, and of requests that were cut: what it was, or the time they
    had waited for it; for ``ttft_p95_of_all_s`` what has no whole answer lasts for ever. ``f1`` is token F1 with the
    full cache's answer, without a full cache with the true one. ``cached`` is a share of the answered prompts' tokens,
    ``computed`` shares of those admitted, by reason; None where the server does not say. ``not_worth_s`` are the
    seconds predicted, and those it took, for tokens that were not worth loading; ``evictions`` and ``drops`` what the
    server counts of them, in the run.
    """

    system: str
    kind: str
    rate: float
    repetition: int | None
    num_requests: float
    num_refused: float
    num_cut: float
    num_failed: float
    offered_rps: float | None
    answers_rps: float | None
    goodput_rps: float | None
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    ttft_p95_of_all_s: float | None
    f1: float | None
    cached: float | None
    computed: Mapping[str, float] | None
    not_worth_s: Mapping[str, float] | None
    evictions: Mapping[str, float] | None
    drops: Mapping[str, float] | None

    def computed_for(self, reason: str) -> float | None:
        """The share of the prompts' tokens computed for one reason."""
        return None if self.computed is None else self.computed.get(reason, 0.0)

    @property
    def held(self) -> float | None:
        """The share of the prompts' tokens computed although held, but for those not worth loading."""
        if self.computed is None:
            return None
        return sum(share for reason, share in self.computed.items() if reason not in (NEW, NOT_WORTH, DROPPED))


def loaded(results: Results) -> list[Loaded]:
    """Every run, by system, rate and repetition."""
    return [
        _loaded(results, system["kind"], run)
        for system in results.systems
        for rate in results.rates
        for run in results.runs_of(system["name"], rate)
    ]


def median(runs: Iterable[Loaded]) -> list[Loaded]:
    """One for each system and rate, in order, each figure the median of those that its repetitions know."""
    groups: dict[tuple[str, float], list[Loaded]] = {}
    for run in runs:
        groups.setdefault((run.system, run.rate), []).append(run)
    return [_median(group) for group in groups.values()]


def knee(rates: Sequence[Loaded]) -> float | None:
    """The highest rate, in requests/s, at which a system keeps up: it answers what is offered, but for 5 %, with a 95th
    percentile of TTFT of at most twice that with one client; 0 where it does at none.

    ``extra_rates`` are one system's, of one repetition. None without a rate of one client or one of an offered rate.
    """
    unloaded_s = next((each.ttft_p95_of_all_s for each in rates if each.rate == 0), None)
    offered = [each for each in rates if each.rate > 0]
    if unloaded_s is None or not offered:
        return None
    return max((each.rate for each in offered if _keeps_up(each, UNLOADED * unloaded_s)), default=0.0)


def _keeps_up(each: Loaded, limit_s: float) -> bool:
    if each.answers_rps is None or each.offered_rps is None or each.ttft_p95_of_all_s is None:
        return False
    return each.answers_rps >= LEAST_ANSWERED * each.offered_rps and each.ttft_p95_of_all_s <= limit_s


def _loaded(results: Results, kind: str, run: Run) -> Loaded:
    requests, limit_s = list(run.requests.values()), results.plan.get("config", {}).get("ttft_limit_s")
    complete = [request for request in requests if request.is_complete]
    answered = [request.ttft_s for request in complete if request.ttft_s is not None]
    ttft = [*answered, *(request.waited_s for request in requests if request.waited_s is not None)]
    seconds = run.header.get("seconds")
    in_time = [request for request in complete if seconds is None or request.end_s <= seconds]
    good = [request for request in in_time if limit_s is not None and (request.ttft_s or 0.0) <= limit_s]
    took_s = seconds or run.header.get("took_s") or 0.0
    scores = [results.scores.get((run.system, run.repetition, run.rate, request.index)) for request in complete]
    measure = "f1_truth" if results.full_cache is None else "f1_full_cache"
    f1 = [value for score in scores if score is not None and (value := getattr(score, measure)) is not None]
    prompt_tokens = sum(request.prompt_tokens for request in complete)
    computed, not_worth_s = _admission(run)
    return Loaded(
        system=run.system,
        kind=kind,
        rate=run.rate,
        repetition=run.repetition,
        num_requests=len(requests),
        num_refused=sum(request.is_refused for request in requests),
        num_cut=sum(request.is_cut for request in requests),
        num_failed=sum(request.has_failed for request in requests),
        offered_rps=(len(requests) / seconds if seconds else run.rate) if run.rate else None,
        answers_rps=len(in_time) / took_s if took_s else None,
        goodput_rps=len(good) / took_s if took_s and limit_s is not None else None,
        ttft_mean_s=statistics.fmean(ttft) if ttft else None,
        ttft_p50_s=known_quantile(ttft, 0.5),
        ttft_p95_s=known_quantile(ttft, 0.95),
        ttft_p99_s=known_quantile(ttft, 0.99),
        ttft_p95_of_all_s=known_quantile([*answered, *[float("inf")] * (len(requests) - len(answered))], 0.95),
        f1=statistics.fmean(f1) if f1 else None,
        cached=sum(request.cached_tokens for request in complete) / prompt_tokens if prompt_tokens else None,
        computed=computed,
        not_worth_s=not_worth_s,
        evictions=_counted(run, "evictions"),
        drops=_counted(run, "drops"),
    )


def _admission(run: Run) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """Shares of the tokens of admitted prompts that were computed, by reason, and the seconds of those not worth it."""
    found = _counted(run, "admission")
    if found is None or found.get("prompt_tokens", 0.0) <= 0:
        return None, None
    parts: dict[str, dict[str, float]] = {}
    for name, value in found.items():
        part, _, rest = name.partition(" ")
        parts.setdefault(part, {})[rest] = value
    computed = {reason: tokens / found["prompt_tokens"] for reason, tokens in parts.get("computed_tokens", {}).items()}
    return computed, parts.get("not_worth_s")


def _counted(run: Run, name: str) -> dict[str, float] | None:
    """Growth of each number below one name of the server's statistics in a run; None where it has none."""
    before, after = ((run.header.get(when) or {}).get(name) for when in ("stats_before", "stats"))
    if after is None:
        return None
    started = dict(numbers(before or {}))
    return {key: value - started.get(key, 0.0) for key, value in numbers(after)}


def _median(group: Sequence[Loaded]) -> Loaded:
    changed: dict[str, Any] = {"repetition": None}
    for field in fields(Loaded):
        if field.name in ("system", "kind", "rate", "repetition"):
            continue
        known = [value for each in group if (value := getattr(each, field.name)) is not None]
        if known and isinstance(known[0], Mapping):
            names = dict.fromkeys(name for each in known for name in each)
            changed[field.name] = {name: statistics.median(each.get(name, 0.0) for each in known) for name in names}
        else:
            changed[field.name] = statistics.median(known) if known else None
    return replace(group[0], **changed)
