"""Searches for budgets on the testbed. As a program it makes the committed files anew:

PYTHONPATH=bench python -m evicbench.budgets.searches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from evicbench.budgets.questions import OBJECTIVE, PRESS, Questions, objective_of, tasks_of, testbed
from evicbench.paths import BENCH
from sglang_evicpress.profiler.local.objective import SINKS, Task
from sglang_evicpress.search.budget_file import BudgetFile, read_budget_file, write_budget_file
from sglang_evicpress.search.evolution import SearchSettings, found, search
from sglang_evicpress.search.layer_budgets import Budgets, expanded

FOLDER = BENCH / "configs" / "budgets"
FAMILIES = ("needle", "redundant", "mapping", "mixed")
NUM_TOKENS = 768
SEARCHED_ON = Questions(40, 100, FAMILIES, NUM_TOKENS)
"""Seed 100 and on: contexts of searches; held-out ones have lower seeds."""

TARGETS = (64, 128, 256)
TRANSFERRED = 128
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Search:
    """A search at ``target`` tokens a layer; each seed draws contexts of its own."""

    target: int
    seed: int = 0
    iterations: int = 20

    @property
    def path(self) -> Path:
        return FOLDER / f"testbed-{self.target}-seed{self.seed}.json"

    @property
    def questions(self) -> Questions:
        return replace(SEARCHED_ON, seed=SEARCHED_ON.seed + self.seed)

    def run(self, tasks: Sequence[Task]) -> BudgetFile:
        settings = SearchSettings(self.target, 2, iterations=self.iterations, seed=self.seed, least=SINKS)
        objective = objective_of(tasks)
        steps = list(search(objective, testbed().num_layers, settings))
        budgets = found(steps, self.target)
        note = {
            "command": "PYTHONPATH=bench python -m evicbench.budgets.searches",
            "model": "bench/evicbench/testbed/model",
            "press": PRESS,
            "objective": OBJECTIVE,
            "score": round(objective(budgets), 4),
            "questions": sum(len(task.asked) for task in tasks),
            "candidates": len(steps),
            "seed": self.seed,
        }
        return BudgetFile.of(budgets, self.target, note)


def committed(search: Search, target: int | None = None) -> Budgets:
    """Tokens by layer of the committed file, at its own target or expanded to another."""
    return expanded(read_budget_file(str(search.path)).shares, target or search.target)


def all_searches() -> list[Search]:
    return [*(Search(target) for target in TARGETS), *(Search(TRANSFERRED, seed) for seed in SEEDS[1:])]


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for each in all_searches():
        file = each.run(tasks_of(each.questions.contexts()))
        write_budget_file(str(each.path), file)
        print(each.path.name, [round(share, 3) for share in file.shares], file.note["score"], flush=True)


if __name__ == "__main__":
    main()
