"""Answers over layers that keep different numbers of tokens equal transformers with a mask per layer."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from evicbench.codecs import path
from evicbench.correctness import uneven
from evicbench.correctness.exactness import run_jobs
from evicbench.correctness.findings import TOLERANCE, Finding
from evicbench.correctness.reference import Reference
from evicbench.tiers.restart import Stoppable

pytestmark = pytest.mark.e2e


def _bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


@pytest.mark.parametrize("page_size", [1, 16], ids=["page_1", "page_16"])
def test_answers_equal_the_reference_in_place_below_the_gpu_and_after_a_restart(tmp_path: Path, page_size: int) -> None:
    model, arguments = path.make_model(tmp_path), uneven.arguments(tmp_path, page_size)
    with Stoppable(*arguments, model=model) as server:
        setting = path.Setting(server, Reference(model), tmp_path / "ssd", page_size)
        in_place = run_jobs(server, setting.reference, page_size, uneven.in_place())
        below = [
            finding for codec in ("int4", "int8") for finding in path.play(setting, uneven.below(page_size), codec)
        ]
        assert server.post("/evicpress/check")["violations"] == []
        assert server.get("/evicpress/tiers")["errors"] == {}
        cases = path.CodedCase("restart", setting), path.CodedCase("restart, int8", setting, "int8")
        played = [path.before_restart(case, uneven.CODED) for case in cases]
        server.end(signal.SIGTERM)
    with Stoppable(*arguments, model=model) as server:
        restarted = [finding for each in played for finding in path.after_restart(each, server)]
        assert server.post("/evicpress/check")["violations"] == []
    assert not _bad(in_place)
    assert not _bad(below)
    assert not _bad(restarted)
    assert setting.tally.num_values > 0 and setting.tally.num_wrong == 0
    assert min(min(each.controls) for each in in_place if each.controls) > 100 * TOLERANCE
    assert min(min(each.controls) for each in below + restarted if each.controls) > 100 * TOLERANCE
