"""README's table of releases: a run replaces its own row and no other."""

from __future__ import annotations

import pytest
from evicbench.paths import ROOT
from evicbench.releases.table import AREAS, row, with_row

from sglang_evicpress.patches.hook_points import SUPPORTED_SGLANG

TABLE = "# x\n\n| SGLang | a |\n|---|---|\n| 0.5.1 | old |\n| 0.5.10 | other |\n\nend\n"


def test_a_run_replaces_its_own_row() -> None:
    assert with_row(TABLE, "0.5.1", "| 0.5.1 | new |") == TABLE.replace("| 0.5.1 | old |", "| 0.5.1 | new |")


def test_a_release_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"README has 0 rows of SGLang 0\.5\.2: expected one"):
        with_row(TABLE, "0.5.2", "| 0.5.2 | new |")


def test_a_row_says_what_was_not_measured_and_what_was_missed() -> None:
    cells = row("0.5.1", {"install": True, "storm": False}, "torch 2").split(" | ")
    assert (cells[1], cells[2], cells[AREAS.index("storm") + 1]) == ("ok", "-", "**missed**")


@pytest.mark.parametrize("version", SUPPORTED_SGLANG)
def test_readme_has_a_row_of_each_release(version: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_row(readme, version, row(version, {}, "here")) != readme
