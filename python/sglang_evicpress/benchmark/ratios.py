"""Two systems compared by the requests that both took: the same question, asked at the same time of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.benchmark.results import MOST_FAILED, Results

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Paired:
    """Ratio of the times of two systems.

    ``ratio`` is that of the means, with its 95 % interval from ``low`` to ``high``; ``median_of_repetitions`` that of
    the ratios of the repetitions' means; ``median_of_pairs`` that of the ratios of single requests.
    """

    ratio: float
    low: float
    high: float
    median_of_repetitions: float
    median_of_pairs: float
    num_pairs: int
    num_repetitions: int


def paired(
    results: Results,
    system: str,
    over: str,
    rate: float,
    *,
    overhead_s: float = 0.0,
    family: str | None = None,
) -> Paired | None:
    """TTFT of ``system`` over that of ``over`` at one rate; ``overhead_s`` is taken off every time before.

    A request that was cut counts with the time it had waited, as in the TTFT of a system. None where they share no
    request, either refused more than next to none, or ``over`` takes no longer than ``overhead_s``.
    """
    repetitions = list(_shared(results, system, over, rate, overhead_s, family))
    if not repetitions:
        return None
    ones, others = (np.concatenate(each) for each in zip(*repetitions, strict=True))
    if others.mean() <= 0.0:
        return None
    low, high = np.quantile(_resampled(repetitions), (0.025, 0.975), method="nearest")
    means = np.array([(one.mean(), other.mean()) for one, other in repetitions])
    return Paired(
        ratio=float(ones.mean() / others.mean()),
        low=float(low),
        high=float(high),
        median_of_repetitions=float(np.median(_divided(means[:, 0], means[:, 1]))),
        median_of_pairs=float(np.median(_divided(ones, others))),
        num_pairs=len(ones),
        num_repetitions=len(repetitions),
    )


def _shared(
    results: Results, system: str, over: str, rate: float, overhead_s: float, family: str | None
) -> Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Times of the requests that both took, per repetition that both ran, in the order of arrival; none of any where
    those refused are too many."""
    others = {run.repetition: run for run in results.runs_of(over, rate)}
    found, num_shared, num_refused = [], 0, 0
    for run in results.runs_of(system, rate):
        other = others.get(run.repetition)
        if other is None:
            continue
        pairs = []
        for index in sorted(run.requests.keys() & other.requests.keys()):
            one, right = run.requests[index], other.requests[index]
            if family not in (None, one.family):
                continue
            num_shared += 1
            num_refused += one.is_refused or right.is_refused
            if one.ttft_or_waited_s is not None and right.ttft_or_waited_s is not None:
                pairs.append((one.ttft_or_waited_s - overhead_s, right.ttft_or_waited_s - overhead_s))
        if pairs:
            columns = np.array(pairs, np.float64)
            found.append((columns[:, 0], columns[:, 1]))
    return found if num_refused <= MOST_FAILED * num_shared else []


def _resampled(repetitions: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> NDArray[np.float64]:
    """Ratios of the means of samples drawn with replacement, each as large as what was measured.

    Drawn are blocks of requests that follow each other, about sqrt(n) long, in each repetition: they wait for each
    other, so that single ones would make the interval too narrow.
    """
    rng = np.random.default_rng(0)
    sums = np.zeros((2, DRAWS))
    for pair in repetitions:
        count = len(pair[0])
        length = max(1, round(count**0.5))
        starts = rng.integers(0, count, (DRAWS, -(-count // length)))
        drawn = (starts[:, :, None] + np.arange(length)).reshape(DRAWS, -1)[:, :count] % count
        sums += [values[drawn].sum(axis=1) for values in pair]
    return _divided(sums[0], sums[1])


def _divided(ones: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    result = np.full(ones.shape, np.inf)
    np.divide(ones, others, out=result, where=others > 0.0)
    return result
