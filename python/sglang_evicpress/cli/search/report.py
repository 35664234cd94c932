"""Report of a search: tokens by layer and score of the budgets that are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_evicpress.search.intervals import paired_interval
from sglang_evicpress.search.layer_budgets import Budgets
from sglang_evicpress.tables import aligned

RIVALS = ("uniform", "pyramid")
FOUND = "found"
MAX_TARGET = 10_000_000


@dataclass(frozen=True, slots=True)
class Compared:
    """Budgets and the score of each question of each context, in the same order for all that are compared."""

    budgets: Budgets
    scores: Sequence[Sequence[float]]

    @property
    def mean(self) -> float:
        questions = [score for context in self.scores for score in context]
        return sum(questions) / len(questions)


def table(compared: Mapping[str, Compared], exact: float | None) -> list[str]:
    """A row for each name: its score and tokens by layer. ``exact``: the score of the answers over exact KV."""
    rows = [["budgets", "score", "mean", "tokens by layer"]]
    for name, each in compared.items():
        mean = sum(each.budgets) / len(each.budgets)
        rows.append([name, f"{each.mean:.4f}", f"{mean:g}", layers(each.budgets)])
    if exact is not None:
        rows.append(["exact KV", f"{exact:.4f}", "all", "all"])
    return aligned(rows)


def gain(compared: Mapping[str, Compared]) -> tuple[str, float, float, float]:
    """The better of ``RIVALS`` by its mean, and the gain of ``FOUND`` over it with its 95 % interval."""
    rival = max(RIVALS, key=lambda name: compared[name].mean)
    return rival, *paired_interval(compared[FOUND].scores, compared[rival].scores)


@dataclass(frozen=True, slots=True)
class Report:
    """Budgets compared on the questions of ``heading``; ``exact`` as for ``table``."""

    heading: str
    num_questions: int
    compared: Mapping[str, Compared]
    exact: float | None

    def lines(self) -> Iterator[str]:
        rival, mean, low, high = gain(self.compared)
        num_contexts = len(self.compared[FOUND].scores)
        interval = "too few contexts for an interval" if math.isinf(low) else f"95 % {low:+.4f} to {high:+.4f}"
        yield f"{self.heading}: {self.num_questions} about {num_contexts} contexts"
        yield from table(self.compared, self.exact)
        yield f"{FOUND} - {rival}: {mean:+.4f} ({interval})\n"

    def record(self) -> dict[str, object]:
        """JSON object of it; the ends of the interval are null where there are too few contexts."""
        rival, mean, low, high = gain(self.compared)
        budgets = {
            name: {"score": each.mean, "tokens_by_layer": list(each.budgets)} for name, each in self.compared.items()
        }
        found = {"over": rival, "mean": mean, "low": low, "high": high}
        return {"questions": self.heading, "budgets": budgets, "exact": self.exact, "gain": found}


def layers(budgets: Budgets) -> str:
    """Tokens by layer, equal neighbours once: ``64x3 20 8``."""
    runs = list[tuple[int, int]]()
    for budget in budgets:
        count = runs.pop()[1] if runs and runs[-1][0] == budget else 0
        runs.append((budget, count + 1))
    return " ".join(f"{budget}" if count == 1 else f"{budget}x{count}" for budget, count in runs)
