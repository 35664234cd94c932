"""Answers over layers that keep different numbers of tokens equal transformers with a mask per layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from evicbench.codecs import path, uneven
from evicbench.correctness.findings import TOLERANCE, Finding

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]


def _bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


def test_answers_equal_the_reference_in_place_below_the_gpu_and_after_a_restart(tmp_path: Path) -> None:
    outcome = uneven.run(tmp_path, path.make_model(tmp_path), 16)
    assert (outcome.violations, outcome.errors) == ([], {})
    for findings, least in ((outcome.in_place, 100), (outcome.below, 10), (outcome.restarted, 10)):
        assert not _bad(findings)
        assert min(min(each.controls) for each in findings if each.controls) > least * TOLERANCE
    assert outcome.tally.num_values > 0 and outcome.tally.num_wrong == 0
