"""Tests of every item that needs no real server, run and counted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from foundation.report import Line

ROOT = Path(__file__).parents[2]


def measure() -> Iterator[Line]:
    for what, words in SUITES.items():
        yield _line(what, words)


def _line(what: str, words: tuple[str, ...]) -> Line:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *words, f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [
        case.get("name")
        for case in cases
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
    ]
    figure = f"{len(cases) - len(failed)} of {len(cases)} pass"
    if failed or done.returncode:
        figure += f"; status {done.returncode}, first: {failed[0] if failed else done.stdout[-200:]}"
    return Line(what, "every test passes, none is skipped", figure, bool(cases) and not failed and not done.returncode)


SUITES: dict[str, tuple[str, ...]] = {}
