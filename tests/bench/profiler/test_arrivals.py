"""When the requests of figure 10 arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from evicbench.profiler.arrivals import arrivals, read_times

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,396,109\n2023-11-16 18:15:50.6805900,879,55\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + ROWS)
    return path


def test_the_first_rows_of_a_trace_are_stretched_over_the_run(trace: Path) -> None:
    times, origin = arrivals(3, 8.0, trace)
    assert times == pytest.approx([0.0, 4.0, 8.0])
    assert "the first 3 arrivals of the Azure conversation trace, 4 s made 8 s" in origin


@pytest.mark.parametrize("has_trace", [True, False])
def test_without_enough_rows_they_are_made_up_the_same_each_time(trace: Path, has_trace: bool, tmp_path: Path) -> None:
    path = trace if has_trace else tmp_path / "missing.csv"
    times, origin = arrivals(5, 10.0, path)
    assert times == arrivals(5, 10.0, path)[0]
    assert times[0] == 0.0 and times[-1] == pytest.approx(10.0) and times == sorted(times)
    assert "made-up" in origin


def test_a_row_without_a_time_is_named(trace: Path) -> None:
    trace.write_text(HEAD + ROWS + "yesterday,1,2\n")
    assert len(read_times(trace, 3)) == 3
    with pytest.raises(ValueError, match=r"trace.csv line 5 begins with 'yesterday'"):
        read_times(trace, 4)


@pytest.mark.parametrize(("count", "seconds"), [(1, 10.0), (3, 0.0)])
def test_too_few_arrivals_are_refused(count: int, seconds: float, trace: Path) -> None:
    with pytest.raises(ValueError, match="expected at least two in some time"):
        arrivals(count, seconds, trace)
