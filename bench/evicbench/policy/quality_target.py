"""Quality targets against fixed alphas chosen in hindsight: quality that is held, and time that it costs."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evicbench.policy.runs import LIMITS, in_processes, load, settings_of
from evicbench.report import Line
from sglang_evicpress.simulator import runs
from sglang_evicpress.simulator.runs import make_replay
from sglang_evicpress.traces import Request, Trace

QUALITIES = (0.95, 0.97, 0.99)
MIXES = ((1.0, 4.0, 20.0), (0.5, 2.0, 10.0), (3.0, 10.0, 50.0), (5.0, 0.0, 0.0))
"""GPU, host and SSD in percent of the working set."""

ALPHAS = (3.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1000.0, 5000.0)
SPLICES = (("mooncake", "weka"), ("weka", "mooncake"))
SPLICED_BLOCK_TOKENS = 64
CURVE_ERROR = 0.05
UNJUDGED_SHARE = 0.25  # of the requests, the first
LEAST_REQUESTS = 2000  # of a trace that is judged
FAR_BELOW = 0.05  # quality does not rise this much where alpha falls
QUALITY_SHORT, MEAN_RATIO, MOST_RATIO = 0.005, 1.05, 1.10


@dataclass(frozen=True, slots=True)
class Trial:
    """A replay of ``traces``, one or two spliced in the middle, at a fixed alpha or a quality target."""

    traces: tuple[str, ...]
    sizes: tuple[float, ...]
    alpha: float | None = None
    quality: float | None = None
    curve_error: float = 0.0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """Figures of the requests that are judged: ``quality`` is the mean over the tokens served from the cache."""

    trial: Trial
    num_requests: int
    quality: float
    ttft_s: float


@functools.lru_cache(maxsize=4)
def trace_of(names: tuple[str, ...], limit: int | None) -> tuple[Trace, int]:
    """The trace and its working set in tokens; of two, the first half of the first and the second of the second."""
    traces = [load(name, limit or LIMITS.get(name)) for name in names]
    if len(traces) == 1:
        return traces[0]
    (first, _), (second, _) = traces
    half, rest = len(first.requests) // 2, len(second.requests) // 2
    early, late = _in_blocks(first, 0), _in_blocks(second, 1)
    shift_s = early[half - 1].arrival_s - late[rest].arrival_s
    requests = [*early[:half], *(replace(request, arrival_s=request.arrival_s + shift_s) for request in late[rest:])]
    spliced = Trace("+".join(names), SPLICED_BLOCK_TOKENS, requests)
    return spliced, spliced.working_set_tokens


def _in_blocks(trace: Trace, which: int) -> list[Request]:
    """The requests in small blocks, with ids that no other trace has."""
    num = trace.block_tokens // SPLICED_BLOCK_TOKENS
    return [
        replace(
            request, blocks=tuple(2 * (block * num + part) + which for block in request.blocks for part in range(num))
        )
        for request in trace.requests
    ]


def judge(trial: Trial) -> Judged:
    trace, working_set = trace_of(trial.traces, trial.limit)
    settings = replace(settings_of(trial.sizes, working_set), curve_error=trial.curve_error)
    outcomes = list(make_replay(trace, runs.Run("evicpress", trial.alpha, trial.quality), settings).run())
    judged = outcomes[int(len(outcomes) * UNJUDGED_SHARE) :]
    cached = [sum(outcome.hit_tokens.values()) for outcome in judged]
    lost = math.fsum((1.0 - outcome.quality) * tokens for outcome, tokens in zip(judged, cached, strict=True))
    return Judged(
        trial,
        len(outcomes),
        1.0 - lost / max(1, sum(cached)),
        statistics.fmean(outcome.ttft_s for outcome in judged),
    )


def judge_cell(cell: Trial) -> list[Judged]:
    """All targets on a cell, and the fixed alphas from the highest down to the first that is far below all targets."""
    results = [judge(replace(cell, quality=quality)) for quality in QUALITIES]
    for alpha in sorted(ALPHAS, reverse=True):
        results.append(judge(replace(cell, alpha=alpha)))
        if results[-1].quality < min(QUALITIES) - FAR_BELOW:
            break
    return results


def fastest(results: Sequence[Judged], target: Judged) -> Judged | None:
    """The fastest of the fixed alphas that have the quality of a target on its cell, None where none has."""
    cell, quality = replace(target.trial, quality=None), target.trial.quality or 1.0
    fixed = [
        result
        for result in results
        if result.trial.alpha is not None and replace(result.trial, alpha=None) == cell and result.quality >= quality
    ]
    return min(fixed, key=lambda result: result.ttft_s, default=None)


def targets(
    traces: tuple[str, ...],
    mixes: Sequence[tuple[float, ...]] = MIXES,
    errors: Sequence[float] = (0.0,),
    limit: int | None = None,
) -> Iterator[Line]:
    """Each target on each cell, a size mix under one error of the curves, against the fixed alphas of that cell."""
    cells = [Trial(traces, sizes, curve_error=error, limit=limit) for sizes in mixes for error in errors]
    results = [result for results in in_processes(judge_cell, cells) for result in results]
    ratios, shorts = list[float](), list[float]()
    num_unreached = 0
    for result in (result for result in results if result.trial.quality is not None):
        shorts.append((result.trial.quality or 1.0) - result.quality)
        best = fastest(results, result)
        if best is None:
            num_unreached += 1
        else:
            ratios.append(result.ttft_s / best.ttft_s)
        print(f"      {_row(result, best)}", flush=True)
    name = "+".join(traces) + (f", curves wrong by {CURVE_ERROR}" if any(errors) else "")
    is_judged = results[0].num_requests >= LEAST_REQUESTS
    yield Line(
        f"{name}: measured quality at targets {', '.join(f'{quality:g}' for quality in QUALITIES)}",
        f"at most {QUALITY_SHORT} below on any of {len(shorts)} cells",
        f"worst {max(shorts):+.4f} below",
        max(shorts) <= QUALITY_SHORT if is_judged else None,
    )
    if not ratios:
        return
    yield Line(
        f"{name}: mean TTFT over that of the fastest of {len(ALPHAS)} fixed alphas with the target's quality",
        f"<= {MEAN_RATIO:g}x on average, {MOST_RATIO:g}x on any cell",
        f"{statistics.fmean(ratios):.3f}x on average, worst {max(ratios):.3f}x"
        + (f"; on {num_unreached} cells no fixed alpha has it" if num_unreached else ""),
        statistics.fmean(ratios) <= MEAN_RATIO and max(ratios) <= MOST_RATIO if is_judged else None,
    )


def _row(result: Judged, best: Judged | None) -> str:
    trial = result.trial
    mix = "/".join(f"{size:g}" for size in trial.sizes)
    error = f", curves {trial.curve_error:+g}" if trial.curve_error else ""
    row = f"{mix:9s} %{error}, target {trial.quality}: quality {result.quality:.4f}, TTFT {result.ttft_s:.4f} s"
    if best is None:
        return row + "; no fixed alpha has it"
    ratio = result.ttft_s / best.ttft_s
    return row + f"; alpha {best.trial.alpha:g} {best.quality:.4f}, {best.ttft_s:.4f} s: {ratio:.3f}x"


def wrong_curves(trace: str, limit: int | None = None) -> Iterator[Line]:
    """Curves that promise too much, and too little."""
    return targets((trace,), MIXES[-1:], (CURVE_ERROR, -CURVE_ERROR), limit)


def spliced(limit: int | None = None) -> Iterator[Line]:
    for traces in SPLICES:
        yield from targets(traces, MIXES[:1], limit=limit)
