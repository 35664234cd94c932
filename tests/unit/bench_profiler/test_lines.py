"""The runner of `make show-...`: which parts run, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from foundation.report import Line
from lines import run_parts
from show_profiler import PARTS


def good() -> Iterator[Line]:
    yield Line("this", "1", "1", True)


def bad() -> Iterator[Line]:
    yield Line("that", "1", "0", False)


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        ([], 1, "2 lines, 1 missed"),
        (["--only", "goo"], 0, "1 lines, 0 missed"),
        (["--only", "bad"], 1, "1 lines, 1 missed"),
        (["--only", "none"], 1, "0 lines, 0 missed"),
    ],
)
def test_status_is_non_zero_if_a_line_is_missed_or_there_is_none(
    words: list[str], status: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["show", *words])
    assert run_parts("What it does.\n\nMore.", {"good": good, "bad": bad}) == status
    assert printed in capsys.readouterr().out


def test_every_line_says_what_its_target_and_its_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["show"])
    run_parts(None, {"bad": bad})
    assert "MISSED that | target: 1 | measured: 0" in capsys.readouterr().out


def test_every_part_of_the_profiler_exists_under_its_own_name() -> None:
    names = [name for _, name, _ in PARTS]
    assert len(set(names)) == len(names)
    for module, _, function in PARTS:
        assert callable(getattr(import_module(module), function))
