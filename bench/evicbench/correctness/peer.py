"""Our presses' selections against kvpress's, on the same model and text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from evicbench.paths import ROOT
from evicbench.report import Line

TESTS = ROOT / "tests" / "unit" / "press"
PEER = "kvpress"


def measure() -> Iterator[Line]:
    """Runs the tests that compare with the golden file kvpress made, and those that show where we differ on purpose."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", PEER, str(TESTS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    passed = sum(map(int, re.findall(r"(\d+) passed", done.stdout)))
    tail = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    yield Line(
        "scores: keydiff, knorm and snapkv select what kvpress 0.5.5 selects (golden file), differences are named",
        "every comparison equal, none skipped",
        tail,
        done.returncode == 0 and passed > 0 and "skipped" not in done.stdout,
    )
