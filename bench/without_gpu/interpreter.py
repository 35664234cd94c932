"""Every kernel in Triton's interpreter over the shared case matrix, and the three parts of every kernel file."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from foundation.report import Line

ROOT = Path(__file__).parents[2]
NOT_KERNELS = ("aot", "pool")  # the compiler's check, and what all of them share


def kernel_files() -> list[str]:
    return sorted(path.stem for path in (ROOT / "kernels").glob("*.py") if path.stem not in NOT_KERNELS)


def parts(module: ModuleType) -> tuple[list[str], list[str]]:
    """Device kernels of a file, and its launchers: the functions beside which there is one that ends in _torch."""
    names = vars(module)
    kernels = [name for name in names if name.startswith("_") and name.endswith("_kernel")]
    references = [name.removesuffix("_torch") for name in names if name.endswith("_torch") and not name.startswith("_")]
    return kernels, [name for name in references if inspect.isfunction(names.get(name))]


def structure() -> Line:
    found, incomplete, untested = [], [], []
    for name in kernel_files():
        module = import_module(f"sglang_evicpress.kernels.{name}")
        kernels, launchers = parts(module)
        of_file = [each for each in launchers if getattr(module, each).__module__ == module.__name__]
        test = ROOT / "tests/kernels" / f"test_{name}.py"
        text = test.read_text() if test.exists() else ""
        found += of_file
        incomplete += [name] if not kernels or not of_file else []
        untested += [each for each in of_file if each not in text]
    return Line(
        f"kernel files: {', '.join(kernel_files())}",
        "each has a device kernel, its launcher and a torch reference; tests name every launcher",
        f"{len(found)} launchers with references; incomplete: {incomplete or 'none'}; not tested: {untested or 'none'}",
        bool(found) and not incomplete and not untested,
    )


def run_tests(paths: list[str], *, interpreted: bool) -> dict[str, Counter[str]]:
    """Outcome of every test of some files, per file: passed, failed or skipped."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(
                f"pytest {' '.join(paths)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr}"
            )
        found: dict[str, Counter[str]] = {}
        for case in ET.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            files = [part for part in case.get("classname", "").split(".") if part.startswith("test_")]
            name = files[-1] if files else "?"
            found.setdefault(name, Counter())[result] += 1
    return found


def verdict(what: str, target: str, found: Counter[str]) -> Line:
    """Nothing may fail, nothing may be skipped, and something must have run."""
    figure = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    return Line(what, target, figure, bool(found["passed"]) and not found["failed"] and not found["skipped"])


def measure() -> Iterator[Line]:
    yield structure()
    results = run_tests(["tests/kernels"], interpreted=True)
    for name in ("pool", *kernel_files()):
        yield verdict(
            f"interpreter: {name} against its reference",
            "every case passes, none is skipped",
            results.get(f"test_{name}", Counter()),
        )
