"""Tests as measurements: pytest in a process of its own, and what became of every test."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from evicbench.paths import ROOT
from evicbench.report import Line

_COMMAND = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")


def run_tests(*words: str, interpreted: bool = False) -> dict[str, Counter[str]]:
    """Numbers of tests that passed, failed, were skipped, or are of ``other`` releases of SGLang only, by file. Raises
    RuntimeError where pytest did not run all.

    ``interpreted``: Triton's interpreter runs the kernels, whatever the machine has.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*_COMMAND, f"--junitxml={report}", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode > 1 or not report.exists():
            raise RuntimeError(
                f"pytest {' '.join(words)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr}"
            )
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, Counter[str]] = {}
    for case in cases:
        outcome = _outcome_of(case)
        found.setdefault(case.get("file", "?"), Counter())[outcome] += 1
        if outcome == "failed":
            print(f"    failed: {case.get('classname')}::{case.get('name')}", flush=True)
    return found


def _outcome_of(case: ElementTree.Element) -> str:
    if any(child.tag in ("failure", "error") for child in case):
        return "failed"
    skip = case.find("skipped")
    if skip is None:
        return "passed"
    return "other" if "this SGLang" in skip.get("message", "") else "skipped"


def together(found: dict[str, Counter[str]], *prefixes: str) -> Counter[str]:
    """Results of all files whose path begins with one of the prefixes."""
    return sum((counts for file, counts in found.items() if file.startswith(prefixes)), Counter[str]())


def verdict(what: str, target: str, found: Counter[str]) -> Line:
    """Nothing may fail, nothing may be skipped but what is of other releases only, and something must have run."""
    figure = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    if found["other"]:
        figure += f", {found['other']} of other SGLangs only"
    return Line(what, target, figure, bool(found["passed"]) and not found["failed"] and not found["skipped"])


def passed(what: str, target: str, *words: str, interpreted: bool = False) -> Line:
    """The line of one run of pytest."""
    return verdict(what, target, together(run_tests(*words, interpreted=interpreted), ""))
