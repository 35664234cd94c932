"""`make show-policy`: measures every promise of the policy that a machine without a GPU can; one line each.

Ends with status 1 if a line is MISSED. Takes at most 15 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. Traces are read from the folder EVICPRESS_TRACES or a data folder beside the checkout; where one is not
found, our own generator stands in and the line says which.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from foundation.report import Line
from lines import run_parts
from policy import rivals
from policy.optimality import measure_optimality
from policy.speed import measure_speed

ROOT = Path(__file__).resolve().parents[1]


TESTS = (
    (
        "figure 2 of the EvicPress paper",
        ("tests/unit/policy/test_evicpress_policy.py", "-k", "figure_2"),
        "joint choice: quality 100 % in 0.5 s; eviction alone 2.4 s, compression alone 75 %",
    ),
    ("property tests (hypothesis)", ("tests/unit/policy/test_properties.py",), "all hold"),
    ("hidden cost laws are learned", ("tests/unit/test_costs.py",), "converges, x0.1 followed within 20 observations"),
)


def run_tests() -> Iterator[Line]:
    """Promises kept by tests: the tests' own verdict."""
    for what, chosen, target in TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        verdict = (run.stdout.strip() or run.stderr.strip() or "pytest said nothing").splitlines()[-1]
        yield Line(f"{what}: {chosen[0]}", target, verdict, run.returncode == 0)


def parts() -> dict[str, Callable[[], Iterator[Line]]]:
    found: dict[str, Callable[[], Iterator[Line]]] = {
        "tests": run_tests,
        "optimality": measure_optimality,
        "speed": measure_speed,
        "simulator": rivals.speed,
    }
    for trace in ("mooncake", "miniswe", "weka"):
        found[f"headline-{trace}"] = partial(rivals.headline, trace)
        found[f"mixes-{trace}"] = partial(rivals.mixes, trace)
    return found


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, parts()))
