"""`bench/show.py`: which measurements run, how lines are judged, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import show
from evicbench.report import Line, Measurement, run_measurements, unjudged


def good() -> Iterator[Line]:
    yield Line("this", "1", "1", True)


def bad() -> Iterator[Line]:
    yield Line("that", "1", "0", False)


def broken() -> Iterator[Line]:
    yield Line("this", "1", "1", True)
    raise RuntimeError("the server ended\nits log")


@pytest.fixture
def area(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three measurements in the place of those of the policy: one has no quick size, one is not judged at it."""
    measurements = {"good": Measurement(good, good), "bad": Measurement(bad, unjudged(bad)), "long": Measurement(good)}
    monkeypatch.setattr(show, "import_module", lambda name: SimpleNamespace(MEASUREMENTS=measurements))


@pytest.mark.usefixtures("area")
@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        ([], 1, "3 lines, 1 missed"),
        (["--only", "goo"], 0, "1 lines, 0 missed"),
        (["--only", "bad"], 1, "MISSED that | target: 1 | measured: 0\n"),
        (["--only", "bad", "--quick"], 0, "quick  that | target: 1 | measured: 0\n"),
        (["--quick"], 0, "2 lines, 0 missed"),
        (["--quick", "--only", "long"], 1, "0 lines, 0 missed"),
        (["--list"], 0, "good *\nbad *\nlong\n"),
    ],
)
def test_status_is_non_zero_if_a_line_is_missed_or_there_is_none(
    words: list[str], status: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show.main(["policy", *words]) == status
    assert printed in capsys.readouterr().out


def test_a_measurement_that_raises_is_missed_and_the_next_one_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_measurements({"broken": broken, "good": good}) == 1
    printed = capsys.readouterr().out
    assert "MISSED broken | target: measured to its end | measured: RuntimeError: the server ended\n" in printed
    assert "3 lines, 1 missed" in printed


@pytest.mark.usefixtures("area")
def test_a_word_that_no_measurement_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        show.main(["policy", "--only", "none"])
    assert "expected good, bad, long" in capsys.readouterr().err


@pytest.mark.parametrize("area", show.AREAS)
def test_every_area_lists_measurements(area: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([area, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 1
    assert all(callable(each.full) for each in show.measurements_of(area).values())
