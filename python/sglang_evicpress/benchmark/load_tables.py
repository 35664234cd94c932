"""Markdown of what every system did under load: the medians of the repetitions at every rate, and where they bend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sglang_evicpress.benchmark.load import knee, loaded, median
from sglang_evicpress.benchmark.results import Results
from sglang_evicpress.benchmark.summary import DROPPED, NEW, NOT_WORTH, Cell
from sglang_evicpress.tables import markdown, ms, number, share


def load_lines(results: Results) -> Iterator[str]:
    """Nothing where no rate is a multiple of saturation."""
    if not results.multiples:
        return
    runs = loaded(results)
    for rate in results.rates:
        yield from ("", f"## Under load: {rate_name(rate, results.multiples)}", "")
        at = [each for each in median(runs) if each.rate == rate]
        yield from markdown(_HEAD, [_row(each, results.f1) for each in at])
        yield ""
        yield from markdown(_REASONS_HEAD, [_reasons_row(each) for each in at])
    limit_s = results.plan.get("config", {}).get("ttft_limit_s")
    within = "no TTFT limit" if limit_s is None else f"TTFT within {limit_s:g} s"
    yield ""
    yield f"Medians of the repetitions, TTFT in ms. Answers, and goodput ({within}), per second of the arrivals."
    yield from ("", "## The knee: answers >= 95 % of what is offered, TTFT p95 <= 2x that with one client", "")
    repetitions = sorted({each.repetition for each in runs if each.repetition is not None})
    yield from markdown(
        ("system", *(f"repetition {each + 1}, requests/s" for each in repetitions)),
        [
            [system["name"], *(number(knee(of(runs, system["name"], each)), 2) for each in repetitions)]
            for system in results.systems
        ],
    )


def rate_name(rate: float, multiples: Mapping[float, float]) -> str:
    if rate == 0:
        return "one client"
    known = multiples.get(rate)
    return f"{rate:g}/s" + ("" if known is None else f", {known:g} x saturation")


def of(runs: Sequence[Cell], system: str, repetition: int | None) -> list[Cell]:
    """One system's, of one repetition, by rate."""
    found = [each for each in runs if (each.system, each.repetition) == (system, repetition)]
    return sorted(found, key=lambda each: each.rate)


_HEAD = (
    *("system", "offered/s", "answers/s", "goodput/s", "TTFT mean", "p50", "p95", "p99", "F1", "prompt tokens cached"),
    *("requests", "refused", "cut", "failed"),
)
_REASONS_HEAD = (
    *("system", "computed: new", "not worth loading", "predicted, actual s", "dropped", "other held", "of that"),
    *("evictions", "drops"),
)


def _row(each: Cell, measure: str) -> list[str]:
    return [
        each.system,
        *(number(value, 2) for value in (each.offered_rps, each.completed_rps, each.goodput_rps)),
        *(ms(value) for value in (each.ttft.mean_s, each.ttft.p50_s, each.ttft.p95_s, each.ttft.p99_s)),
        number(each.quality(measure)),
        share(each.held.hit_share),
        *(f"{value:g}" for value in (each.num_requests, each.num_refused, each.num_cut, each.num_failed)),
    ]


def _reasons_row(each: Cell) -> list[str]:
    others = {
        reason: part
        for reason, part in sorted((each.work.computed or {}).items(), key=lambda item: -item[1])
        if reason not in (NEW, NOT_WORTH, DROPPED) and part
    }
    seconds = each.work.not_worth_s or {}
    return [
        each.system,
        share(each.work.computed_for(NEW)),
        share(each.work.computed_for(NOT_WORTH)),
        ", ".join(number(seconds.get(name), 1) for name in ("predicted", "actual")) if seconds else "-",
        share(each.work.computed_for(DROPPED)),
        share(each.work.recomputed),
        ", ".join(f"{reason} {share(part)}" for reason, part in others.items()) or "-",
        _counts(each.work.evictions),
        _counts(each.work.drops),
    ]


def _counts(counted: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in (counted or {}).items() if value) or "-"
