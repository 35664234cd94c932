"""EvolKV: layer budgets by evolution, one group of layers after the other (section 3.2, algorithm 1).

The optimizer is CMA-ES of the package ``cmaes``, over budgets divided by the target, with sigma 0.3 and a population of
``4 + floor(3 ln n_g)`` (section 4.1). A journal of what was evaluated makes a search resumable: the same seed asks for
the same candidates, and what is in the journal is not evaluated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from sglang_evicpress.files import write_whole
from sglang_evicpress.search.layer_budgets import Budgets, complete, uniform

if TYPE_CHECKING:
    from cmaes import CMA

MAX_SEED = (2**32 - 1) // 1000 - 1
"""Of a search: numpy takes 32 bits for the seed of each group."""

Score = Callable[[Budgets], float]
"""How well a task is done with these budgets: f of the paper, higher is better."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """``target``: mean budget c; ``group_size``: layers searched together, n_g; ``efficiency_weight``: lambda;
    ``smoothing``: gamma; ``iterations``: generations a group, M; ``least``: fewest tokens a layer keeps, such as the
    sinks. Raises ValueError where one is out of range."""

    target: int
    group_size: int = 8
    efficiency_weight: float = 0.3
    smoothing: float = 0.2
    sigma: float = 0.3
    iterations: int = 10
    seed: int = 0
    least: int = 1

    def __post_init__(self) -> None:
        for name, least in (("target", 1), ("group_size", 2), ("iterations", 1), ("least", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least {least}")
        if not 0.0 < self.smoothing <= 1.0:
            raise ValueError(f"smoothing is {self.smoothing}: expected above 0 and at most 1")
        for name, value in (("efficiency_weight", self.efficiency_weight), ("sigma", self.sigma)):
            if not value > 0.0:
                raise ValueError(f"{name} is {value}: expected above 0")
        if self.target < self.least:
            raise ValueError(f"target is {self.target}: expected at least {self.least}, which every layer keeps")


@dataclass(frozen=True, slots=True)
class Step:
    """One evaluated candidate: the group it was for, all budgets, the task's score and the fitness (equation 1)."""

    group: int
    budgets: Budgets
    score: float
    fitness: float
    is_best: bool


def cache_score(budgets: Sequence[int], target: int, smoothing: float) -> float:
    """CacheScore of equation 2: ``max(0, 1 - (k - c) / c)`` for a mean ``k`` above the target ``c``, and
    ``1 - gamma * (1 - k / c)`` up to it."""
    mean = sum(budgets) / len(budgets)
    if mean > target:
        return max(0.0, 1.0 - (mean - target) / target)
    return 1.0 - smoothing * (1.0 - mean / target)


def groups_of(num_layers: int, group_size: int) -> list[range]:
    """Neighbouring layers, the lowest first; the last group may be smaller (section 3.2 and algorithm 1, line 2).

    A last layer that would be a group by itself joins the group below, other than in the paper: it can give its tokens
    to no other, so that CacheScore keeps it at the target. With 2, 1 layers in place of 3 the testbed's F1 at 128
    tokens a layer is 0.857 on the questions of the search, and not 0.917.
    """
    borders = [*range(0, num_layers, group_size), num_layers]
    if len(borders) > 2 and borders[-1] - borders[-2] == 1:
        del borders[-2]
    return [range(begin, end) for begin, end in pairwise(borders)]


def population_of(num_layers: int) -> int:
    """Candidates a generation (section 4.1)."""
    return 4 + math.floor(3 * math.log(num_layers))


_EXPECTED = "expected the journal of a search, or no file"


class Journal:
    """Scores by budgets, each appended to a file of JSON lines as soon as it is known; a last line that was cut off is
    evaluated anew. Raises ValueError for a file of another search."""

    def __init__(self, path: Path | None, identity: Mapping[str, object]) -> None:
        self._path = path
        self._known: dict[Budgets, float] = {}
        if path is None:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): {_EXPECTED}") from None
        whole = [line for line in lines if line.endswith(b"\n")]
        if lines and not whole:
            raise ValueError(f"{path} has no whole line: {_EXPECTED}")
        try:
            header, *scores = map(orjson.loads, whole) if whole else (identity,)
            self._known = {tuple(line["budgets"]): float(line["score"]) for line in scores}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} cannot be read ({error}): {_EXPECTED}") from None
        if not isinstance(header, dict):
            raise ValueError(f"{path} begins with {header!r:.60}: {_EXPECTED}")
        if other := _difference(header, identity):
            raise ValueError(f"{path} is the journal of another search ({other}): expected one of this, or no file")
        if whole != lines or not whole:
            write_whole(str(path), b"".join(whole) or orjson.dumps(identity) + b"\n")

    def __len__(self) -> int:
        return len(self._known)

    def score(self, budgets: Budgets, evaluate: Score) -> float:
        """The score of these budgets, from the journal or evaluated now."""
        if budgets not in self._known:
            self._known[budgets] = evaluate(budgets)
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(orjson.dumps({"budgets": budgets, "score": self._known[budgets]}) + b"\n")
        return self._known[budgets]


def check_journal(path: Path, num_layers: int, task: Mapping[str, object]) -> None:
    """Begin the journal of such a search, or see that it is there and can be written. Raises ValueError for a file of
    another search, and one that cannot be written."""
    Journal(path, _identity(num_layers, task))
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): {_EXPECTED}") from None


def _identity(num_layers: int, task: Mapping[str, object]) -> dict[str, object]:
    return {"search": "evolkv", "num_layers": num_layers, **task}


def num_steps(num_layers: int, settings: SearchSettings) -> int:
    """Candidates that a search evaluates."""
    groups = groups_of(num_layers, settings.group_size)
    return settings.iterations * sum(population_of(len(group)) for group in groups)


def search(
    evaluate: Score,
    num_layers: int,
    settings: SearchSettings,
    path: Path | None = None,
    task: Mapping[str, object] | None = None,
) -> Iterator[Step]:
    """Every candidate as it is evaluated; the budgets of the last one that ``is_best`` are the result, which
    ``complete`` brings to the target. ``path``: the journal, which holds for this ``task`` alone."""
    target = settings.target
    journal = Journal(path, _identity(num_layers, task or {}))
    best, best_fitness = uniform(num_layers, target), -math.inf
    for number, layers in enumerate(groups_of(num_layers, settings.group_size)):
        optimizer = _optimizer(len(layers), settings, number)
        for _ in range(settings.iterations):
            told = list[tuple[np.ndarray, float]]()
            for _ in range(optimizer.population_size):
                asked = optimizer.ask()
                group = [max(settings.least, round(float(share) * target)) for share in asked]
                budgets = (*best[: layers.start], *group, *best[layers.stop :])
                score = journal.score(budgets, evaluate)
                efficiency = cache_score(group, target, settings.smoothing)
                fitness = score * (1.0 + settings.efficiency_weight * efficiency)
                if is_best := fitness > best_fitness:
                    best, best_fitness = budgets, fitness
                told.append((asked, -fitness))
                yield Step(number, budgets, score, fitness, is_best)
            optimizer.tell(told)


def found(steps: Sequence[Step], target: int) -> Budgets:
    """The best budgets of a search, completed to the target."""
    return complete([step for step in steps if step.is_best][-1].budgets, target)


def check_optimizer() -> None:
    """Raise ValueError where the package of the optimizer is not installed."""
    if find_spec("cmaes") is None:
        raise ValueError("the package cmaes is not installed: pip install 'sglang-evicpress[search]'")


def _difference(known: Mapping[str, object], identity: Mapping[str, object]) -> str:
    """The first thing in which a journal is of another search; empty if none."""
    for name, value in identity.items():
        if known.get(name) != value:
            return f"{name} {known.get(name)!r:.60}, not {value!r:.60}"
    return ""


def _optimizer(num_layers: int, settings: SearchSettings, number: int) -> CMA:
    """CMA-ES over the budgets of a group divided by the target, from the target on."""
    from cmaes import CMA

    bounds = np.tile([settings.least / settings.target, float(num_layers) * 2.0], (num_layers, 1))
    return CMA(
        mean=np.ones(num_layers),
        sigma=settings.sigma,
        bounds=bounds,
        seed=settings.seed * 1000 + number,
        population_size=population_of(num_layers),
    )
