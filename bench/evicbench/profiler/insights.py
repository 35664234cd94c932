"""The two insights of the EvicPress paper on the testbed: contexts differ in what compression costs them (section 3.1),
and no press is the best for all of them (section 3.2).

The paper's footnote calls the ratio the share that is kept, but its own figures only fit together if it is the share
that is dropped: section 4.2 has quality fall from 0.92 to 0.82 as the ratio rises from 0.2 to 0.4, and its 0.67 at
ratio 0.9 on NarrativeQA is 1 less the median sensitivity of section 3.1, 0.34. So its ratio of 0.9 is taken for a
tenth kept, its 0.6 for 0.4 kept, and sensitivity with nine tenths kept is reported besides.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evicbench.paths import out_file
from evicbench.profiler import plots
from evicbench.profiler.study import FIGURE_4, FRACTIONS, PRESSES, Measured, study
from evicbench.report import Line
from sglang_evicpress.core import Form
from sglang_evicpress.tables import markdown

MARGIN = 0.02
"""By how much a press must lead the next one to win a context; what is nearer is a tie."""

LEAST_CORRELATION = 0.5
SENSITIVITY_KEPT = 0.1
KEPT = (0.9, 0.8, 0.5, 0.4, 0.2, 0.1)
TIE = "tie"


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of the sensitivities of some contexts. ``cv``: coefficient of variation (n - 1), 0 where all are 0."""

    median: float
    least: float
    most: float
    cv: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        mean = statistics.fmean(values)
        cv = statistics.stdev(values) / mean if mean > 0.0 else 0.0
        return cls(statistics.median(values), min(values), max(values), cv)


def sensitivity(context: Measured, kept: float, scorer: str = "logprob") -> float:
    """The quality lost by keydiff; that of exact KV is 1."""
    return 1.0 - context.quality(Form("keydiff", kept), scorer)


def halves(contexts: Sequence[Measured], kept: float) -> float:
    """Pearson's correlation, over contexts, of sensitivity on the training and on the held-out questions: near 0 if
    what differs is only which questions were drawn."""
    form = Form("keydiff", kept)
    asked_twice = [context for context in contexts if context.has_training]
    training = [statistics.fmean(context.training[form]) for context in asked_twice]
    held_out = [statistics.fmean(context.held_out["logprob"][form]) for context in asked_twice]
    if len(set(training)) < 2 or len(set(held_out)) < 2:
        return 0.0
    return statistics.correlation(training, held_out)


def winner(qualities: Mapping[str, float]) -> str:
    """The press that leads by more than ``MARGIN``, or ``TIE``."""
    first, second = sorted(qualities.values(), reverse=True)[:2]
    return max(qualities, key=qualities.__getitem__) if first - second > MARGIN else TIE


def by_press(context: Measured, kept: float, scorer: str = "logprob") -> dict[str, float]:
    return {press: context.quality(Form(press, kept), scorer) for press in PRESSES}


def wins(contexts: Sequence[Measured], kept: float, scorer: str = "logprob") -> Counter[str]:
    """Number of contexts that each press wins, and of ties."""
    return Counter(winner(by_press(each, kept, scorer)) for each in contexts)


def measure_insights() -> Iterator[Line]:
    contexts = study()
    out_file("profiler", "insights.md").write_text(tables(contexts))
    plots.draw_sensitivity(
        {
            kept: {family: [sensitivity(each, kept) for each in some] for family, some in by_family(contexts).items()}
            for kept in (SENSITIVITY_KEPT, 0.5)
        }
    )
    plots.draw_wins({kept: wins(contexts, kept) for kept in (0.8, 0.5, FIGURE_4, 0.2)}, PRESSES, TIE)
    yield sensitivity_line(contexts)
    yield wins_line(contexts, FIGURE_4)
    yield other_wins_line(contexts)


def by_family(contexts: Sequence[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for context in contexts:
        found.setdefault(context.family, []).append(context)
    return found


def sensitivity_line(contexts: Sequence[Measured]) -> Line:
    spreads = {
        family: Spread.of([sensitivity(context, SENSITIVITY_KEPT) for context in some])
        for family, some in by_family(contexts).items()
    }
    every = Spread.of([sensitivity(context, SENSITIVITY_KEPT) for context in contexts])
    same = halves(contexts, SENSITIVITY_KEPT)
    figures = ", ".join(f"{family} {found.median:.2f} ({found.cv:.2f})" for family, found in spreads.items())
    mild = Spread.of([sensitivity(context, 0.9) for context in contexts])
    return Line(
        f"sensitivity of {len(contexts)} contexts: quality lost by keydiff with a tenth kept (logprob)",
        f"coefficient of variation of every family reported; contexts differ, and in the same way on training and "
        f"held-out questions (r >= {LEAST_CORRELATION})",
        f"median (CV): {figures}; all {every.median:.2f} ({every.cv:.2f}), {every.least:.2f} to {every.most:.2f}, "
        f"r {same:.2f}; with nine tenths kept at most {mild.most:.3f} is lost",
        every.cv > 0.0 and same >= LEAST_CORRELATION,
    )


def wins_line(contexts: Sequence[Measured], kept: float) -> Line:
    found = wins(contexts, kept)
    winners = [press for press in PRESSES if found[press]]
    return Line(
        f"contexts won per press with {kept:g} kept (led by > {MARGIN:g}), {len(contexts)} contexts",
        "at least 2 presses win some, none wins all",
        shares(found, len(contexts)),
        len(winners) >= 2 and max(found[press] for press in PRESSES) < len(contexts),
    )


def other_wins_line(contexts: Sequence[Measured]) -> Line:
    counts = {kept: wins(contexts, kept) for kept in FRACTIONS}
    return Line(
        "the same with 0.8, 0.5 and 0.2 kept",
        "none wins all",
        "; ".join(f"{kept:g}: {shares(found, len(contexts))}" for kept, found in counts.items()),
        all(found[press] < len(contexts) for found in counts.values() for press in PRESSES),
    )


def shares(found: Mapping[str, int], total: int) -> str:
    """Shares of the presses that win any, then of ties."""
    return ", ".join(f"{name} {found[name] / total:.0%}" for name in (*PRESSES, TIE) if found[name] or name == TIE)


def tables(contexts: Sequence[Measured]) -> str:
    """Markdown: sensitivity by family and kept fraction, wins by kept fraction and scorer."""
    families = by_family(contexts)
    lines = [
        "Sensitivity: quality lost by keydiff, median (coefficient of variation) over the contexts of a family; "
        "r is the correlation over all contexts between training and held-out questions.",
        "",
    ]
    rows = []
    for kept in KEPT:
        for scorer in ("logprob", "minilm"):
            if scorer == "minilm" and kept == FIGURE_4:  # not asked about it
                continue
            spreads = [
                Spread.of([sensitivity(each, kept, scorer) for each in some]) for some in (*families.values(), contexts)
            ]
            cells = [f"{found.median:.3f} ({found.cv:.2f})" for found in spreads]
            same = f"{halves(contexts, kept):.2f}" if scorer == "logprob" else ""
            rows.append([f"{kept:g}, {scorer}", *cells, same])
    lines += markdown(["kept, scorer", *families, "all", "r"], rows)
    lines += ["", f"Contexts won (by more than {MARGIN:g}), of {len(contexts)}.", ""]
    rows = []
    for kept in (0.8, 0.5, FIGURE_4, 0.2):
        for scorer in ("logprob", "minilm"):
            if scorer == "logprob" or kept != FIGURE_4:
                found = wins(contexts, kept, scorer)
                rows.append([f"{kept:g}, {scorer}", *(str(found[name]) for name in (*PRESSES, TIE))])
    return "\n".join([*lines, *markdown(["kept, scorer", *PRESSES, TIE], rows), ""])
