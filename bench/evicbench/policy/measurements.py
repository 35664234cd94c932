"""Measurements of `make show-policy`.

Traces are read from the folder EVICPRESS_TRACES or a data folder beside the checkout; where one is not found, our own
generator stands in and the line says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from evicbench.policy import evictors, quality_target, rivals, served_quality
from evicbench.policy.exact_requests import measure_exact_requests
from evicbench.policy.optimality import measure_optimality
from evicbench.policy.speed import measure_speed
from evicbench.policy.stalls import measure_stalls
from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line, Measurement, unjudged

Promised = tuple[str, tuple[str, ...], str]
TESTS: tuple[Promised, ...] = (
    (
        "figure 2 of the EvicPress paper",
        ("tests/unit/policy/test_evicpress_policy.py", "-k", "figure_2"),
        "joint choice: quality 100 % in 0.5 s; eviction alone 2.4 s, compression alone 75 %",
    ),
    ("property tests (hypothesis)", ("tests/unit/policy/test_properties.py",), "all hold"),
    (
        "hidden cost laws are learned",
        ("tests/unit/policy/test_costs.py",),
        "converges, x0.1 followed within 20 observations",
    ),
)


def measure_tests(tests: Sequence[Promised] = TESTS) -> Iterator[Line]:
    for what, chosen, target in tests:
        yield verdict(f"{what}: {chosen[0]}", target, together(run_tests(*chosen), ""))


MEASUREMENTS = {
    "tests": Measurement(measure_tests, partial(measure_tests, TESTS[:1])),
    "optimality": Measurement(measure_optimality, partial(measure_optimality, 4, 1)),
    "speed": Measurement(measure_speed, unjudged(partial(measure_speed, (10_000,), (1_000, 10_000)))),
    "stalls": Measurement(measure_stalls),
    "simulator": Measurement(rivals.speed),
    "evictors": Measurement(evictors.measure, partial(evictors.measure, ("miniswe",))),
    "exact-requests": Measurement(measure_exact_requests),
}
for trace in ("mooncake", "miniswe", "weka"):
    MEASUREMENTS[f"headline-{trace}"] = Measurement(
        partial(rivals.headline, trace), unjudged(partial(rivals.headline, trace, 500))
    )
    MEASUREMENTS[f"mixes-{trace}"] = Measurement(partial(rivals.mixes, trace))
for trace in ("miniswe", "mooncake", "weka"):
    MEASUREMENTS[f"quality-target-{trace}"] = Measurement(
        partial(quality_target.targets, (trace,)),
        unjudged(partial(quality_target.targets, (trace,), quality_target.MIXES[-1:], limit=1000)),
    )
for trace in ("mooncake", "weka"):
    MEASUREMENTS[f"quality-target-wrong-curves-{trace}"] = Measurement(partial(quality_target.wrong_curves, trace))
MEASUREMENTS["quality-target-spliced"] = Measurement(quality_target.spliced)
MEASUREMENTS["quality-target-served"] = Measurement(served_quality.measure)
