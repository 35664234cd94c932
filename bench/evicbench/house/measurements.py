"""Measurements of `make show-house`: all of the structure that a command can measure."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from evicbench.house.source import classes, modules, num_lines, num_untyped
from evicbench.paths import ROOT
from evicbench.pytest_runs import passed
from evicbench.report import Line, Measurement

PRODUCT = ("python", "patches", "kernels", "bench")
BEFORE = {"product and bench": 52_044, "tests": 40_030}
"""Lines at d3d6d97, the commit before the rooms were built, by `num_lines` of this folder's `source.py`."""

QUICK_S = 120

UNTYPED_BEFORE = 989
"""`num_untyped("patches")` at d3d6d97."""

TESTS = (
    ("layers, floors, circles, lazy imports, modules of 500 lines", "tests/unit/test_layers.py"),
    ("old words in their scope", "tests/unit/test_vocabulary.py"),
    ("docstrings, and documents that are cited", "tests/unit/test_prose.py"),
    ("one registration for each change", "tests/unit/test_contributing.py"),
    ("parts: no circle, none given the cache, none reached through", "tests/unit/patches/test_parts.py"),
)


def measure_tests() -> Iterator[Line]:
    for what, path in TESTS:
        yield passed(f"{what}: {path}", "all pass", path)


def measure_types() -> Iterator[Line]:
    run = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    said = (run.stdout.strip() or run.stderr.strip() or "nothing").splitlines()[-1]
    yield Line("types: mypy strict", "no error", said, run.returncode == 0)
    untyped = num_untyped("patches")
    yield Line(
        "Any, cast, getattr with a constant and type: ignore in patches/",
        f"at most a quarter of {UNTYPED_BEFORE}",
        str(untyped),
        untyped * 4 <= UNTYPED_BEFORE,
    )


def measure_sizes() -> Iterator[Line]:
    product, tests = num_lines(*PRODUCT), num_lines("tests")
    yield _fewer("lines of product and bench", BEFORE["product and bench"], product, 2_500)
    yield _fewer("lines of tests", BEFORE["tests"], tests, 1_000)
    longest = max(modules(*PRODUCT), key=lambda path: len(path.read_text(encoding="utf-8").splitlines()))
    num = len(longest.read_text(encoding="utf-8").splitlines())
    yield Line("longest module", "at most 500 lines", f"{num}: {longest.relative_to(ROOT)}", num <= 500)
    readme = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    yield Line("README", "at most 130 lines", str(readme), readme <= 130)
    doors = len(list((ROOT / "patches").glob("*.py")))
    yield Line("modules at the root of patches/", "at most 8", str(doors), doors <= 8)


def _fewer(what: str, before: int, now: int, least: int) -> Line:
    change = f"{abs(before - now):,} {'fewer' if now <= before else 'more'}"
    return Line(what, f"at least {least:,} fewer than {before:,}", f"{now:,}, {change}", before - now >= least)


def measure_classes() -> Iterator[Line]:
    found = list(classes("python", "patches"))
    cache = next(each for each in found if each.name == "EvicPressCache")
    yield Line("bases of EvicPressCache", "RadixCache", ", ".join(cache.bases), cache.bases == ("RadixCache",))
    most = max(found, key=lambda each: each.num_methods)
    yield Line("methods of a class", "at most 40", f"{most.num_methods}: {most.name}", most.num_methods <= 40)
    most = max(found, key=lambda each: each.num_attributes)
    yield Line("attributes of a class", "at most 25", f"{most.num_attributes}: {most.name}", most.num_attributes <= 25)
    protocols = [each for each in found if each.is_protocol]
    widest = max(protocols, key=lambda each: each.num_methods + each.num_attributes)
    num = widest.num_methods + widest.num_attributes
    yield Line("members of a protocol", "at most 20", f"{num}: {widest.name}", num <= 20)


def measure_quick() -> Iterator[Line]:
    """Every other area at its quick size. Figures are the areas' own affair: a line that is MISSED there is there."""
    for area in ("foundation", "policy", "tiers", "profiler", "bench", "decode", "kernels", "mend", "load"):
        start = time.monotonic()
        command = [sys.executable, "bench/show.py", area, "--quick"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            try:
                stdout, stderr = run.communicate(timeout=QUICK_S)
            except subprocess.TimeoutExpired:
                run.terminate()  # it stops its servers, which are in sessions of their own
                yield Line(f"show-{area} --quick", f"at most {QUICK_S} s", f"not done after {QUICK_S} s", False)
                continue
        said = (stdout.strip() or stderr.strip() or "nothing").splitlines()[-1]
        yield Line(
            f"show-{area} --quick",
            f"at most {QUICK_S} s, nothing missed",
            f"{time.monotonic() - start:.0f} s: {said}",
            run.returncode == 0,
        )


MEASUREMENTS = {
    "sizes": Measurement(measure_sizes, measure_sizes),
    "classes": Measurement(measure_classes, measure_classes),
    "types": Measurement(measure_types, measure_types),
    "tests": Measurement(measure_tests, measure_tests),
    "quick": Measurement(measure_quick),
}
