"""README's two commands from a fresh clone in a fresh environment: as far as they fit into this measurement."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evicbench.paths import ROOT
from evicbench.report import Line

COMMANDS = ("make demo", "make test")
FIRST_SCREEN = 40  # lines


def measure() -> Iterator[Line]:
    """The commands stand on the first screen; a clone sets itself up, starts the tests and the demo's program."""
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN])
    missing = [command for command in COMMANDS if command not in screen]
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | {"PYTHONPATH": "bench"}
        steps = (
            ["make", "setup"],
            [".venv/bin/python", "-m", "pytest", "-q", "tests/unit/test_layout.py", "tests/unit/test_config.py"],
            [".venv/bin/python", "-m", "evicbench.demo", "--help"],
        )
        failed = [
            " ".join(step)
            for step in steps
            if subprocess.run(step, cwd=clone, env=env, capture_output=True, check=False).returncode
        ]
    yield Line(
        "README: both commands on the first screen; a fresh clone sets up a fresh environment, starts both "
        "(whole runs: make demo, make test)",
        "no command missing, no step failing",
        f"{len(missing)} missing, {len(failed)} failing" + "".join(f" ({step})" for step in failed),
        not missing and not failed,
    )
