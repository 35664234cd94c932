"""Each way to choose takes what a search through all choices would."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from evicbench.profiler.choices import COLUMNS, KEPT, Table, most_useful, picked, usefulness, within
from hypothesis import given
from hypothesis import strategies as st

QUALITY = st.floats(0.0, 1.0)


def table_of(rows: list[list[float]]) -> Table:
    return np.array([[*row, 1.0] for row in rows])


TABLES = st.lists(st.lists(QUALITY, min_size=len(COLUMNS) - 1, max_size=len(COLUMNS) - 1), min_size=1, max_size=4).map(
    table_of
)


def test_the_last_column_is_the_exact_form() -> None:
    assert COLUMNS[-1].is_exact
    assert KEPT[-1] == 1.0
    assert not any(form.is_exact for form in COLUMNS[:-1])


@given(TABLES, st.floats(0.1, 20.0))
def test_most_useful_weighs_quality_against_loading(table: Table, alpha: float) -> None:
    for row, column in zip(table, most_useful(alpha)(table), strict=True):
        best = max(alpha * quality - kept for quality, kept in zip(row, KEPT, strict=True))
        assert alpha * row[column] - KEPT[column] == pytest.approx(best)


def test_usefulness_is_the_paper_s() -> None:
    table = np.full((1, len(COLUMNS)), 0.5)
    assert usefulness(table, 2.0)[0].tolist() == pytest.approx([1.0 - kept for kept in KEPT])


@given(TABLES, st.floats(0.2, 1.0))
def test_within_fits_and_no_choice_of_as_much_room_is_better(table: Table, room: float) -> None:
    chosen = within(room)(table)
    used = KEPT[chosen].sum()
    assert used <= room * len(table) + 1e-9
    if len(table) > 2:
        return
    columns = range(len(COLUMNS))
    best = max(
        sum(table[row, column] for row, column in enumerate(choice))
        for choice in itertools.product(columns, repeat=len(table))
        if sum(KEPT[column] for column in choice) <= used + 1e-9
    )
    assert picked(table, chosen).sum() == pytest.approx(best, abs=1e-6)


def test_within_leaves_everything_exact_where_there_is_room() -> None:
    table = np.full((3, len(COLUMNS)), 0.9)
    table[:, -1] = 1.0
    assert all(COLUMNS[column].is_exact for column in within(1.0)(table))
