"""Agreement of `logprob`, which generates nothing, with `minilm`, the EvicPress paper's measure, in ranking forms."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from scipy.stats import spearmanr

from evicbench.profiler.study import FORMS, NUM_JUDGED, Measured, study
from evicbench.report import Line

TARGET = 0.8


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Spearman's, ties sharing their mean rank; None where either scorer finds all equal."""
    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return None
    return float(spearmanr(ours, theirs).statistic)


def qualities(context: Measured, scorer: str) -> list[float]:
    """Quality of each of the 15 forms, over the questions that minilm was asked about."""
    scores = context.held_out[scorer]
    return [statistics.fmean(scores[form][:NUM_JUDGED]) for form in FORMS]


def measure_agreement() -> Iterator[Line]:
    contexts = study()
    both = [(qualities(context, "logprob"), qualities(context, "minilm")) for context in contexts]
    found = [rank_correlation(*pair) for pair in both]
    known = [value for value in found if value is not None]
    low: dict[str, list[float]] = {}
    for context, value in zip(contexts, found, strict=True):
        if value is not None and value < TARGET:
            low.setdefault(context.family, []).append(value)
    below = ", ".join(f"{family} {' '.join(f'{value:.2f}' for value in values)}" for family, values in low.items())
    pooled = rank_correlation([value for ours, _ in both for value in ours], [v for _, theirs in both for v in theirs])
    mean = statistics.fmean(known)
    what = f"Spearman of logprob and minilm over {len(FORMS)} forms"
    yield Line(
        f"{what} of a context, mean of {len(known)} contexts",
        f">= {TARGET}",
        f"{mean:.3f}, worst {min(known):.2f}; {len(known) - sum(map(len, low.values()))} of {len(known)} contexts at "
        f"{TARGET} or more, below: {below or 'none'}",
        len(known) == len(contexts) and mean >= TARGET,
    )
    yield Line(
        f"{what} of all contexts together",
        f">= {TARGET}",
        f"{pooled:.3f}" if pooled is not None else "nothing to rank",
        pooled is not None and pooled >= TARGET,
    )
