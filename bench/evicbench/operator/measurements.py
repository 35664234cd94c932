"""Measurements of `make show-operator`.

``prometheus`` needs the Debian package of that name, ``page`` the package ``chromium``. That README alone brings a new
user to a running server is measured where a fresh clone is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from evicbench.mend import hostile
from evicbench.operator import cost, floor, off, page, prometheus, scale, series, tenants
from evicbench.pytest_runs import run_tests, together, verdict
from evicbench.report import Line, Measurement, unjudged

ERRORS = (
    *("tests/unit/test_errors.py", "tests/unit/cli/replay/test_odd_input.py"),
    *("tests/contract/test_refusals.py", "tests/contract/http/test_control.py"),
)
COMMANDS = ("tests/contract/test_documented_commands.py", "tests/unit/cli/test_commands.py")
HOSTILE_S = 30.0


def measure_tests() -> Iterator[Line]:
    """Run all in one process: to import SGLang twice would take longer than the tests."""
    found = run_tests(*ERRORS, *COMMANDS)
    yield verdict(
        "errors of flags, bodies and files, each a row of a table test",
        "each names the value, what is accepted, what to do",
        together(found, *ERRORS),
    )
    yield verdict(
        "commands in docs, README and CONTRIBUTING; flags, --json, exit status and completion of every command",
        "each is parsed, cheap ones are run",
        together(found, *COMMANDS),
    )


MEASUREMENTS = {
    "floor": Measurement(floor.measure, unjudged(partial(floor.measure, 10, 6))),
    "tenants": Measurement(tenants.measure, partial(tenants.measure, 30)),
    "series": Measurement(series.measure),
    "prometheus": Measurement(prometheus.measure),
    "page": Measurement(page.measure),
    "cost": Measurement(cost.measure),
    "off": Measurement(off.measure, off.measure),
    "tests": Measurement(measure_tests),
    "hostile": Measurement(partial(hostile.measure, HOSTILE_S)),
    "scale": Measurement(scale.measure, partial(scale.measure, (1_000,))),
}
