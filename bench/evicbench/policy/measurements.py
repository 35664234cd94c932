"""Measurements of `make show-policy`.

Traces are read from the folder EVICPRESS_TRACES or a data folder beside the checkout; where one is not found, our own
generator stands in and the line says which.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from evicbench.paths import ROOT
from evicbench.policy import rivals
from evicbench.policy.optimality import measure_optimality
from evicbench.policy.speed import measure_speed
from evicbench.report import Line, Measurement

TESTS = (
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


def run_tests() -> Iterator[Line]:
    """What is promised as a test: the tests' own verdict."""
    for what, chosen, target in TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        verdict = (run.stdout.strip() or run.stderr.strip() or "pytest said nothing").splitlines()[-1]
        yield Line(f"{what}: {chosen[0]}", target, verdict, run.returncode == 0)


MEASUREMENTS = {
    "tests": Measurement(run_tests),
    "optimality": Measurement(measure_optimality),
    "speed": Measurement(measure_speed),
    "simulator": Measurement(rivals.speed),
}
for trace in ("mooncake", "miniswe", "weka"):
    MEASUREMENTS[f"headline-{trace}"] = Measurement(partial(rivals.headline, trace))
    MEASUREMENTS[f"mixes-{trace}"] = Measurement(partial(rivals.mixes, trace))
