"""A minute of requests to the real server while host memory and SSD fail on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from evicbench.tiers.chaos import lines, storm

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

SECONDS = 60.0


def test_a_minute_of_chaos_gives_right_answers_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVICPRESS_SSD", str(tmp_path))
    outcome = storm(SECONDS, seed=1, page_size=16)
    assert not outcome.problems, "\n".join(outcome.problems[:20])
    for line in lines(outcome, SECONDS):
        assert line.ok, f"{line.target}, measured {line.figure}"
