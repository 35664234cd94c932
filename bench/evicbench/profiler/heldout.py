"""Forms chosen from training questions, tried on other questions, beside an oracle that knows those.

The product's choice sees what the policy sees: the qualities that ``Catalog.curves_of`` expects by the training
questions' profiles of all contexts, by logprob. The oracle chooses in the same way from the mean quality on the very
held-out questions that both are judged by. So part of its lead is hindsight: which of two equal forms got lucky in
those few questions. How much that is shows in a third choice, from all questions but the one it is judged by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evicbench.profiler.choices import COLUMNS, KEPT, Chooser, Table, most_useful, picked, usefulness, within
from evicbench.profiler.study import FORMS, JUDGES, Measured, study
from evicbench.report import Line
from sglang_evicpress.quality.catalog import Catalog

TARGET = 0.97
ALPHAS = (1.0, 2.0, 5.0, 10.0)
ROOMS = (0.8, 0.6, 0.4)


@dataclass(frozen=True, slots=True)
class Tables:
    """Qualities of ``COLUMNS`` for every context: ``expected`` and ``means`` of training questions, ``held_out`` by
    scorer; ``answers`` has each question by logprob, training ones first, shape [contexts, columns, questions]."""

    expected: Table
    means: Table
    held_out: dict[str, Table]
    answers: NDArray[np.float64]
    num_training: int

    @classmethod
    def of(cls, contexts: Sequence[Measured]) -> Tables:
        catalog = Catalog(None)
        for context in contexts:
            catalog.put(context.profile())
        expected = [[catalog.curves_of(each.key).quality(form) for form in FORMS] for each in contexts]
        training = np.array([[each.training[form] for form in FORMS] for each in contexts])
        held_out = {
            name: np.array([[each.held_out[name][form] for form in FORMS] for each in contexts])
            for name in ("logprob", *JUDGES)
        }
        return cls(
            _with_exact(np.array(expected)),
            _with_exact(training.mean(axis=2)),
            {name: _with_exact(scores.mean(axis=2)) for name, scores in held_out.items()},
            _with_exact(np.concatenate([training, held_out["logprob"]], axis=2)),
            training.shape[2],
        )

    @property
    def keydiff_alone(self) -> Table:
        """Those of only its forms and the exact one: no other is ever chosen."""
        return np.where([form.is_exact or form.press == "keydiff" for form in COLUMNS], self.expected, -1.0)

    def share(self, choose: Chooser, scorer: str = "logprob") -> float:
        """Mean held-out quality of the product's choice over that of the oracle's."""
        table = self.held_out[scorer]
        return float(picked(table, choose(self.expected)).mean() / picked(table, choose(table)).mean())

    def quality(self, choose: Chooser, table: Table) -> float:
        """Mean held-out quality of what ``table`` makes ``choose`` choose."""
        return float(picked(self.held_out["logprob"], choose(table)).mean())

    def without_hindsight(self, choose: Chooser) -> float:
        """Mean held-out quality when each question is answered in the form chosen by all the other questions."""
        count = self.answers.shape[2]
        total = self.answers.sum(axis=2)
        rounds = [
            picked(self.answers[:, :, i], choose((total - self.answers[:, :, i]) / (count - 1))).mean()
            for i in range(self.num_training, count)
        ]
        return float(np.mean(rounds))


def _with_exact(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """A last column of ones: exact KV has quality 1."""
    return np.concatenate([table, np.ones((table.shape[0], 1, *table.shape[2:]))], axis=1)


def measure_heldout() -> Iterator[Line]:
    tables = Tables.of([context for context in study() if context.has_training])
    yield calibration_line(tables)
    yield utility_line(tables)
    for room in ROOMS:
        yield choice_line(tables, f"best mean quality with {room:g} of all contexts' tokens kept", within(room))


def calibration_line(tables: Tables) -> Line:
    """Calibration of the qualities that choices go by: neither too bold nor too timid."""
    lossy = slice(0, len(FORMS))
    expected, means, found = tables.expected[:, lossy], tables.means[:, lossy], tables.held_out["logprob"][:, lossy]
    gap = float((found - expected).mean())
    perfect = means > 0.99
    three = f"{means.mean():.3f}, {expected.mean():.3f} and {found.mean():.3f} in the mean"
    if perfect.any():
        best = ", ".join(f"{table[perfect].mean():.3f}" for table in (means, expected, found))
        three += f", and {best} where training says > 0.99 ({perfect.sum()} forms)"
    return Line(
        f"quality expected after {tables.num_training} training questions, {found.size} forms of contexts",
        "held-out quality is in the mean at most 0.01 below it and 0.03 above it",
        f"{gap:+.3f}; training, expected and held-out are {three}",
        -0.01 <= gap <= 0.03,
    )


def utility_line(tables: Tables) -> Line:
    """(press, kept) of most utility, alpha in times that loading the exact context takes."""
    shares, figures = [], []
    found = tables.held_out["logprob"]
    for alpha in ALPHAS:
        choose = most_useful(alpha)
        ours, oracle = choose(tables.expected), choose(found)
        gained = usefulness(found, alpha)
        shares.append(tables.share(choose))
        figures.append(
            f"alpha {alpha:g}: {shares[-1]:.1%} ({judged(tables, choose)}), kept {KEPT[ours].mean():.2f}/"
            f"{KEPT[oracle].mean():.2f}, utility {picked(gained, ours).mean():.2f}/{picked(gained, oracle).mean():.2f}"
        )
    return Line(
        f"held-out quality, {len(found)} contexts: press and kept fraction of most utility by training questions over "
        f"those by an oracle",
        f">= {TARGET:.0%} at every alpha",
        f"{'; '.join(figures)} (ours/oracle)",
        min(shares) >= TARGET,
    )


def choice_line(tables: Tables, what: str, choose: Chooser) -> Line:
    oracle = tables.quality(choose, tables.held_out["logprob"])
    share = tables.share(choose)
    return Line(
        f"the same: {what}",
        f">= {TARGET:.0%}",
        f"{share:.1%} ({tables.quality(choose, tables.expected):.3f} of {oracle:.3f}; {judged(tables, choose)}); "
        f"without hindsight an oracle has {tables.without_hindsight(choose) / oracle:.1%}, means in place of them "
        f"{tables.quality(choose, tables.means) / oracle:.1%}, keydiff alone "
        f"{tables.quality(choose, tables.keydiff_alone) / oracle:.1%}",
        share >= TARGET,
    )


def judged(tables: Tables, choose: Chooser) -> str:
    return ", ".join(f"{scorer} {tables.share(choose, scorer):.1%}" for scorer in JUDGES)
