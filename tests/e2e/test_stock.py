"""Off is stock, and exact forms answer as stock does: three servers get the same requests."""

from __future__ import annotations

import pytest
from evicbench.correctness.stock import compare, compare_import
from evicbench.report import Line
from evicbench.testbed.server import FORKED_START

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def comparison() -> tuple[list[Line], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(FORKED_START)  # by SGLang's own command, as users start it
        return compare(num_asks=40, num_prompts=40)


def test_importing_and_loading_without_the_flag_hooks_nothing() -> None:
    line = compare_import()
    assert line.ok, line.figure


def test_without_the_flag_responses_are_those_of_stock(comparison: tuple[list[Line], list[str]]) -> None:
    (off, _), differences = comparison
    assert off.ok, "\n".join([off.figure, *differences[:5]])


def test_exact_forms_answer_as_stock_does_under_pressure(comparison: tuple[list[Line], list[str]]) -> None:
    (_, exact), differences = comparison
    assert exact.ok, "\n".join([exact.figure, *differences[:5]])
