"""Assembly of runs: which there are, and that they are about the same contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.simulator.replay import Machine
from sglang_evicpress.simulator.runs import (
    GivenCurves,
    Run,
    Settings,
    all_runs,
    make_replay,
    offline_curve,
    servers_at_load,
)
from sglang_evicpress.simulator.sensitivity import Sensitivities
from sglang_evicpress.traces import Request, Trace, read_trace

KNORM, SNAPKV = Form("knorm", 0.4), Form("snapkv", 0.4)
COSTS = CostSnapshot(PrefillCost(1.0, 0.5, 0.0), {Tier.SSD: TransferCost(0.0, 1.0)}, {})
TRACE = Trace("two", 10, [Request(2.0, (1,), 10), Request(6.0, (2,), 12)])


def test_alpha_makes_runs_only_where_it_is_used() -> None:
    assert all_runs(("lru", "evicpress"), (1.0, 2.0)) == (Run("lru"), Run("evicpress", 1.0), Run("evicpress", 2.0))


def test_a_target_makes_runs_only_of_the_policy_that_can_hold_it() -> None:
    expected = (Run("lru"), Run("adaptcache", 2.0), Run("evicpress", 2.0), Run("evicpress", target=0.95))
    assert all_runs(("lru", "adaptcache", "evicpress"), (2.0,), (0.95,)) == expected


@pytest.mark.parametrize("curve_error", [0.0, 0.05])
def test_a_target_is_held_and_spent(curve_error: float) -> None:
    trace = read_trace("synthetic:chat:3", limit=2400)
    capacity = {
        Tier.GPU: trace.working_set_tokens // 50,
        Tier.HOST: trace.working_set_tokens // 20,
    }
    costs = CostSnapshot(PrefillCost(0.01, 1e-4, 0.0), {Tier.HOST: TransferCost(5e-4, 1e6)}, {})
    settings = Settings(Machine(capacity, costs), 1, (KNORM, SNAPKV), curve_error=curve_error)

    def served(run: Run) -> tuple[float, float]:
        outcomes = list(make_replay(trace, run, settings).run())[600:]
        cached = [sum(outcome.hit_tokens.values()) for outcome in outcomes]
        lost = sum((1.0 - outcome.quality) * num for outcome, num in zip(outcomes, cached, strict=True))
        return 1.0 - lost / sum(cached), sum(outcome.ttft_s for outcome in outcomes)

    quality, ttft_s = served(Run("evicpress", target=0.95))
    assert 0.945 <= quality < 0.985
    assert served(Run("evicpress", 0.01))[0] < 0.9  # it could be worse
    most = 1.0 if not curve_error else 1.005  # what is judged worse than predicted leaves less to spend
    assert ttft_s < most * served(Run("evicpress", 1e4))[1]
    assert served(Run("evicpress", target=0.95)) == (quality, ttft_s)


def test_a_target_of_1_serves_nothing_lossy() -> None:
    trace = read_trace("synthetic:chat:3", limit=300)
    settings = Settings(Machine({Tier.GPU: trace.working_set_tokens // 20}, COSTS), 1, (KNORM,))
    outcomes = list(make_replay(trace, Run("evicpress", target=1.0), settings).run())
    assert {outcome.quality for outcome in outcomes} == {1.0}
    assert any(outcome.quality < 1.0 for outcome in make_replay(trace, Run("evicpress", 1e-3), settings).run())


def test_a_context_is_the_same_whatever_else_is_on_the_menu() -> None:
    """Otherwise a policy with a form of its own would be compared on other contexts."""
    small = Sensitivities((EXACT, KNORM), seed=3)
    other = Sensitivities((EXACT, KNORM), seed=4)
    large = Sensitivities((EXACT, SNAPKV, Form("random", 0.3), KNORM), seed=3)
    for key in range(50):
        assert small.curve(key) == (1.0, large.curve(key)[3])
    assert [small.curve(key) for key in range(9)] != [other.curve(key) for key in range(9)]


def test_a_codec_loses_alike_with_any_press() -> None:
    forms = EXACT, KNORM, Form(codec="int8"), Form(codec="int4"), replace(KNORM, codec="int4")
    for key in range(50):
        exact, pressed, int8, int4, both = Sensitivities(forms, seed=3).curve(key)
        assert (exact, 1.0 - int4) == (1.0, pytest.approx(pressed - both))
        assert 0.998 <= int8 <= 1.0 and 0.98 <= int4 < 1.0


def test_given_curves_are_those_of_every_context() -> None:
    curves = GivenCurves((EXACT, KNORM), Curves.from_json({"knorm": {"0.4": 0.7}}))
    assert curves.curve(1) == curves.curve(2) == (1.0, pytest.approx(0.7))
    assert offline_curve(curves) == (1.0, pytest.approx(0.7))


def test_offline_curve_is_a_mean() -> None:
    exact, compressed = offline_curve(Sensitivities((EXACT, KNORM), seed=0))
    assert exact == 1.0
    assert 0.3 < compressed < 0.95


def test_a_tier_may_be_left_out_and_a_policy_brings_its_form() -> None:
    settings = Settings(Machine({Tier.GPU: 100, Tier.SSD: 100}, COSTS), 1, (KNORM,))
    replay = make_replay(TRACE, Run("snapkv@0.4+lru"), settings)
    assert replay.menu.tiers == (Tier.GPU, Tier.SSD)
    assert set(replay.menu.forms) == {EXACT, KNORM, SNAPKV}
    assert set(make_replay(TRACE, Run("lru"), settings).menu.forms) == {EXACT, KNORM}
    assert replay.learner is None


def test_noise_makes_policies_learn() -> None:
    settings = Settings(Machine({Tier.GPU: 100}, COSTS, noise=0.1), 1, ())
    assert make_replay(TRACE, Run("lru"), settings).learner is not None


def test_servers_at_load() -> None:
    """1 + 5 and 1 + 6 seconds of work arrive within 4 seconds."""
    assert servers_at_load(TRACE, COSTS, 0.5) == pytest.approx(13 / 4 / 0.5)
    with pytest.raises(ValueError, match="at once"):
        servers_at_load(Trace("one", 10, TRACE.requests[:1]), COSTS, 0.5)
