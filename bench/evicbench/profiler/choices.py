"""Ways to choose a form for every context from a table of qualities. Rows are contexts, columns ``COLUMNS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evicbench.profiler.study import FORMS
from sglang_evicpress.core import EXACT
from sglang_evicpress.policy.utility import utility

Table: TypeAlias = NDArray[np.float64]
Choice: TypeAlias = NDArray[np.intp]
Chooser: TypeAlias = Callable[[Table], Choice]

COLUMNS = (*FORMS, EXACT)
KEPT: Table = np.array([form.kept_fraction for form in COLUMNS])
LOAD_S = 1.0
"""Time to the first token of a context that is loaded exact, in whatever unit: only its ratio to alpha counts."""


def most_useful(alpha: float) -> Chooser:
    """The form of most utility where loading takes time in proportion to what is kept."""

    def choose(table: Table) -> Choice:
        found: Choice = usefulness(table, alpha).argmax(axis=1)
        return found

    return choose


def usefulness(table: Table, alpha: float) -> Table:
    """The utility (EvicPress section 4.2) of every form."""
    delays = [LOAD_S * float(kept) for kept in KEPT]
    return np.array([[utility(1.0, alpha, *each) for each in zip(row.tolist(), delays, strict=True)] for row in table])


def within(room: float) -> Chooser:
    """The forms of best mean quality that keep at most a share ``room`` of all tokens of contexts of equal length: at
    one price for what is kept, the lowest at which they fit.
    """

    def choose(table: Table) -> Choice:
        low, high = 0.0, 1e6
        for _ in range(100):
            price = (low + high) / 2.0
            fits = KEPT[(table - price * KEPT).argmax(axis=1)].mean() <= room
            low, high = (low, price) if fits else (price, high)
        found: Choice = (table - high * KEPT).argmax(axis=1)
        return found

    return choose


def picked(table: Table, choice: Choice) -> Table:
    """Chosen value of each row."""
    found: Table = table[np.arange(len(table)), choice]
    return found
