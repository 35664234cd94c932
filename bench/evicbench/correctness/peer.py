"""Our presses' selections against kvpress's, on the same model and text."""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line


def measure() -> Iterator[Line]:
    """The tests that compare with the golden file kvpress made, and those that show where we differ on purpose."""
    yield verdict(
        "scores: keydiff, knorm and snapkv select what kvpress 0.5.5 selects (golden file), differences are named",
        "every comparison equal, none skipped",
        together(run_tests("-k", "kvpress", "tests/unit/press"), ""),
    )
