"""Results of a replay: sums over its requests, and the table and the records made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sglang_evicpress.cli.replay.units import show_bytes, three_digits
from sglang_evicpress.quantiles import quantile
from sglang_evicpress.simulator.replay import Outcome, Replay
from sglang_evicpress.simulator.runs import Run
from sglang_evicpress.tables import aligned


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and 95th percentile in seconds."""

    mean_s: float
    p50_s: float
    p95_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(math.fsum(values) / len(values), quantile(values, 0.5), quantile(values, 0.95))


@dataclass(frozen=True, slots=True)
class Result:
    """One run, over the ``num_requests`` of ``num_expected`` it served before it ended or was interrupted.

    ``ttft`` is time to first token, waiting included; ``alone`` the same were nobody else there. Shares are of all
    prompt tokens: ``hit_share`` by the tier they were found on, the rest prefilled. ``moved_bytes`` by direction, such
    as "host to gpu". ``quality`` is the mean over all requests, 1 for one without a cached prefix; ``hit_quality``
    over those with one, ``served_quality`` over the tokens taken from the cache, None if there is none; ``target`` is
    what that was to be. Regret: seconds lost against prefilling instead of loading, as it
    turned out and as the costs predicted; shares are of the sum of TTFT. ``wall_s`` is what the simulation took.
    """

    policy: str
    alpha: float | None
    target: float | None
    num_requests: int
    num_expected: int
    num_tokens: int
    ttft: Spread
    alone: Spread
    hit_share: Mapping[str, float]
    prefilled_share: float
    moved_bytes: Mapping[str, int]
    decisions: Mapping[str, int]
    quality: float
    hit_quality: float | None
    served_quality: float | None
    regret_s: float
    regret_share: float
    predicted_regret_s: float
    predicted_regret_share: float
    typical_gap_s: float
    wall_s: float

    @classmethod
    def of(cls, run: Run, replay: Replay, outcomes: Sequence[Outcome], wall_s: float) -> Result:
        """Sums over the ``outcomes`` that there are, at least one."""
        ttft = [outcome.ttft_s for outcome in outcomes]
        total_s = math.fsum(ttft)
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        hits = {
            tier: sum(outcome.hit_tokens.get(tier, 0) for outcome in outcomes) / max(num_tokens, 1)
            for tier in replay.menu.tiers
        }
        of_hits = [outcome.quality for outcome in outcomes if outcome.hit_tokens]
        regret_s = sum(outcome.regret_s for outcome in outcomes)
        predicted_s = sum(outcome.predicted_regret_s for outcome in outcomes)
        return cls(
            policy=run.policy,
            alpha=run.alpha,
            target=run.target,
            num_requests=len(outcomes),
            num_expected=len(replay.trace.requests),
            num_tokens=num_tokens,
            ttft=Spread.of(ttft),
            alone=Spread.of([outcome.service_s for outcome in outcomes]),
            hit_share={tier.label: share for tier, share in hits.items()},
            prefilled_share=1.0 - sum(hits.values()),
            moved_bytes=dict(sorted(replay.moved_bytes.items())),
            decisions=dict(sorted(replay.decisions.items())),
            quality=sum(outcome.quality for outcome in outcomes) / len(outcomes),
            hit_quality=sum(of_hits) / len(of_hits) if of_hits else None,
            served_quality=_served_quality(outcomes),
            regret_s=regret_s,
            regret_share=regret_s / total_s if total_s else 0.0,
            predicted_regret_s=predicted_s,
            predicted_regret_share=predicted_s / total_s if total_s else 0.0,
            typical_gap_s=replay.reuse.model.typical_gap_s,
            wall_s=wall_s,
        )

    @property
    def is_partial(self) -> bool:
        return self.num_requests < self.num_expected

    @property
    def requests_per_minute(self) -> float:
        return 60.0 * self.num_requests / self.wall_s if self.wall_s > 0.0 else math.inf

    def record(self) -> dict[str, object]:
        """JSON object of it."""
        return {**asdict(self), "is_partial": self.is_partial, "requests_per_minute": self.requests_per_minute}


def lru_over(result: Result, results: Sequence[Result]) -> float | None:
    """Mean TTFT of the first run of lru over that of ``result``: above 1 is faster than lru.

    None without such a run, and where one of the two was interrupted: they did not serve the same requests.
    """
    lru = next((other for other in results if other.policy == "lru"), None)
    if lru is None or lru.is_partial or result.is_partial or result.ttft.mean_s == 0.0:
        return None
    return lru.ttft.mean_s / result.ttft.mean_s


def table(results: Sequence[Result], queued: bool) -> str:
    """One aligned row for each run below a row of names; ``queued`` adds TTFT without waiting. Empty without a run."""
    if not results:
        return ""
    directions = sorted({name for result in results for name in result.moved_bytes})
    rows = [_row(result, results, queued, directions) for result in results]
    names = list(rows[0])
    cells = [names, *([row[name] for name in names] for row in rows)]
    notes = [
        f"PARTIAL: {result.policy} was interrupted after {result.num_requests:,} of {result.num_expected:,} requests"
        for result in results
        if result.is_partial
    ]
    return "\n".join([*aligned(cells), *notes])


def _served_quality(outcomes: Sequence[Outcome]) -> float | None:
    cached = [sum(outcome.hit_tokens.values()) for outcome in outcomes]
    if not any(cached):
        return None
    pairs = zip(outcomes, cached, strict=True)
    return math.fsum(outcome.quality * num_tokens for outcome, num_tokens in pairs) / sum(cached)


def _alpha(result: Result) -> str:
    if result.target is not None:
        return f"for {result.target:g}"
    return "-" if result.alpha is None else f"{result.alpha:g}"


def _row(result: Result, results: Sequence[Result], queued: bool, directions: Sequence[str]) -> dict[str, str]:
    ratio = lru_over(result, results)
    row = {
        "policy": f"{result.policy} (partial)" if result.is_partial else result.policy,
        "alpha": _alpha(result),
        "TTFT s": three_digits(result.ttft.mean_s),
        "p50": three_digits(result.ttft.p50_s),
        "p95": three_digits(result.ttft.p95_s),
    }
    if queued:
        row["alone s"] = three_digits(result.alone.mean_s)
        row["alone p50"] = three_digits(result.alone.p50_s)
        row["alone p95"] = three_digits(result.alone.p95_s)
    row["lru/this"] = "-" if ratio is None else f"{ratio:.2f}"
    for tier, share in result.hit_share.items():
        row[f"{tier} %"] = f"{100.0 * share:.1f}"
    row["prefilled %"] = f"{100.0 * result.prefilled_share:.1f}"
    row["quality"] = f"{result.quality:.4f}"
    row["hit quality"] = "-" if result.hit_quality is None else f"{result.hit_quality:.4f}"
    row["served quality"] = "-" if result.served_quality is None else f"{result.served_quality:.4f}"
    row["regret s"] = three_digits(result.regret_s)
    row["regret %"] = f"{100.0 * result.regret_share:.2f}"
    row["predicted s"] = three_digits(result.predicted_regret_s)
    row["predicted %"] = f"{100.0 * result.predicted_regret_share:.2f}"
    for name in directions:
        row[name.replace(" to ", ">")] = show_bytes(result.moved_bytes.get(name, 0))
    row["requests/min"] = "-" if math.isinf(result.requests_per_minute) else f"{result.requests_per_minute:,.0f}"
    return row
