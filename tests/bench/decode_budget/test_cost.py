"""Readings inside the scheduler: shares of a step, passes in steps, and a count of free slots that must add up."""

from __future__ import annotations

import pytest
from evicbench.decode_budget.cost import NUM_NEW, Run, gauge_line, gauge_problems, idle_line, pass_line, rate_line
from evicbench.decode_budget.watch import Pass, Round, step_seconds

STEP_S = 0.01


def rounds(num: int, batch: int, *, visit_s: float = 0.0001, every: int = 5, pass_s: float = 0.004) -> list[Round]:
    """A batch of which one request drops a page in every fifth round, which takes that much longer."""
    made, began = [], 0.0
    for index in range(num):
        passes = (Pass("page", 1, 0, pass_s),) if index % every == 0 else ()
        seconds = pass_s if passes else 0.0
        made.append(Round(began, batch, visit_s + seconds, 16 * len(passes), 0.00005, passes))
        began += STEP_S + seconds
    return made


def runs(**given: float) -> list[Run]:
    return [Run("tova", 16, "paged", batch, rounds(41, batch, **given)) for batch in (1, 8, 32)]


def test_steps_are_rounds_of_one_batch_without_a_pass() -> None:
    mixed = [*rounds(6, 8), *rounds(6, 4)]
    assert step_seconds(mixed, 8) == pytest.approx([STEP_S] * 4)


def test_the_share_between_passes_counts_the_queries_too() -> None:
    (run, *_) = runs()
    assert run.step_s == pytest.approx(STEP_S)
    assert run.idle_share == pytest.approx(0.015)
    assert idle_line(runs()).ok
    assert not idle_line(runs(visit_s=0.0002)).ok


def test_a_pass_is_counted_in_steps() -> None:
    line = pass_line(runs(pass_s=0.009))
    assert line.ok and "paged at 8: 0.90" in line.figure
    assert not pass_line(runs(pass_s=0.011)).ok


def test_the_gauge_must_rise_by_what_was_freed_and_fall_by_what_was_taken() -> None:
    exact = Round(0.0, 1, 0.0, 16, 0.0, (Pass("copy_out", 3, 32, 0.0),))
    assert gauge_problems([exact, *rounds(6, 1)], 16) == []
    off = Round(0.0, 1, 0.0, 15, 0.0, (Pass("page", 1, 0, 0.0),))
    silent = Round(0.0, 1, 0.0, 16, 0.0, ())
    assert len(gauge_problems([off, silent], 16)) == 2


def test_a_gauge_without_passes_of_every_kind_shows_nothing() -> None:
    every = [Run("tova", 16, kind, 1, [Round(0, 1, 0, 16, 0, (Pass(kind, 1, 0, 0),))]) for kind in
             ("page", "repack", "holefill")]  # fmt: skip
    assert gauge_line(every).ok
    assert not gauge_line(every[:2]).ok


def test_a_pass_per_token_is_seen() -> None:
    def of(every: int, **given: float) -> list[Run]:
        return [Run("knorm", 1, "paged", 1, rounds(NUM_NEW, 1, every=every, **given))]

    line = rate_line(of(17, pass_s=0.001))
    assert line.ok and "1: 6.2 passes" in line.figure
    assert not rate_line(of(1, pass_s=0.001)).ok, "a pass per token"
    assert not rate_line(of(17, pass_s=0.1)).ok, "passes that take half of the time"
    assert not rate_line(of(17)[:0] or [Run("knorm", 1, "paged", 1, [*rounds(3, 1)[1:]])]).ok, "no pass at all"
