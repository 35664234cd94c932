from __future__ import annotations

import pytest

from sglang_evicpress.core import Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.wait_cost import Congestion


def test_it_is_the_mean_number_of_requests_that_a_second_of_computing_delays() -> None:
    congestion = Congestion()
    assert congestion.value == 1.0
    for step in range(1000):
        congestion.observe(step / 10, 4 if step % 2 else 0)
    assert congestion.value == pytest.approx(3.0, abs=0.05)


def test_it_is_forgotten_when_nobody_waits_any_more() -> None:
    congestion = Congestion()
    congestion.observe(0.0, 0)
    congestion.observe(100.0, 5)
    assert congestion.value == pytest.approx(6.0, abs=0.01)
    congestion.observe(100.0 + Congestion.MEMORY_S, 0)
    assert 1.0 < congestion.value < 3.0
    congestion.observe(500.0, 0)
    assert congestion.value == pytest.approx(1.0, abs=1e-6)


def test_it_has_a_limit_and_no_time_that_goes_back() -> None:
    congestion = Congestion()
    congestion.observe(10.0, 0)
    congestion.observe(5.0, 1000)
    assert congestion.value == 1.0
    congestion.observe(1000.0, 1000)
    assert congestion.value == pytest.approx(Congestion.MOST)


def test_recomputing_weighs_more_and_loading_does_not() -> None:
    costs = CostSnapshot(PrefillCost(0.1, 1e-3, 1e-7), {Tier.HOST: TransferCost(1e-3, 1e9)}, {})
    weighed = costs.with_recompute_weight(3.0)
    assert weighed.prefill.seconds(100, 1000) == pytest.approx(3.0 * costs.prefill.seconds(100, 1000))
    assert weighed.load == costs.load
