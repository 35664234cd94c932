"""Measurement of quality targets: spliced traces, and what a target is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from evicbench.policy import quality_target, runs
from evicbench.policy.quality_target import Judged, Trial


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own generator stands in for the files."""
    monkeypatch.setenv("EVICPRESS_TRACES", str(tmp_path))
    runs.load.cache_clear()
    quality_target.trace_of.cache_clear()


@pytest.mark.usefixtures("generated")
def test_a_spliced_trace_is_half_of_each_and_shares_nothing() -> None:
    trace, working_set = quality_target.trace_of(("mooncake", "weka"), 300)
    first, second = (runs.load(name, 300)[0].requests for name in ("mooncake", "weka"))
    half = len(first) // 2
    early, late = trace.requests[:half], trace.requests[half:]
    assert [request.num_tokens for request in early] == [request.num_tokens for request in first[:half]]
    assert [request.num_tokens for request in late] == [request.num_tokens for request in second[len(second) // 2 :]]
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert not {block for request in early for block in request.blocks} & {
        block for request in late for block in request.blocks
    }
    assert working_set == trace.working_set_tokens > 0


def test_a_target_is_compared_with_the_fastest_alpha_that_has_its_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    """Higher alphas: better and slower; those far below all targets are not run."""
    alphas = []

    def judge(trial: Trial) -> Judged:
        if trial.quality is not None:
            return Judged(trial, 2000, trial.quality - 0.001, 2.1)
        assert trial.alpha is not None
        alphas.append(trial.alpha)
        quality = {5000.0: 0.995, 1000.0: 0.98, 300.0: 0.96, 100.0: 0.89, 50.0: 0.5}[trial.alpha]
        return Judged(trial, 2000, quality, {5000.0: 3.0, 1000.0: 2.0, 300.0: 1.5, 100.0: 1.2}[trial.alpha])

    monkeypatch.setattr(quality_target, "judge", judge)
    results = quality_target.judge_cell(Trial(("weka",), (5.0, 0.0, 0.0)))
    assert alphas == [5000.0, 1000.0, 300.0, 100.0]
    fastest = [quality_target.fastest(results, result) for result in results[:3]]
    assert [best.trial.alpha for best in fastest if best is not None] == [300.0, 1000.0, 5000.0]
