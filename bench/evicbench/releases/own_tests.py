"""SGLang's own tests of its radix cache, on its cache and on ours with exact forms: a table of counts.

`python -m evicbench.releases.own_tests FOLDER`, FOLDER being a checkout of SGLang at the release that is installed;
wheels have no tests. Not part of CI, which has no checkout. Status 1 where ours fails what SGLang's passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from evicbench.paths import BENCH, ROOT
from sglang_evicpress.patches.hook_check import sglang_version
from sglang_evicpress.tables import markdown

TESTS = Path("test/registered/unit/mem_cache")
FILES = (
    *("test_radix_cache_unit", "test_radix_force_miss", "test_radix_cache_slru_accuracy", "test_decode_radix_lock_ref"),
    *("test_radix_cache_thread_safety", "test_evict_policy", "test_registry"),
)
PLUGIN = "evicbench.releases.exact_cache"


def run(files: Sequence[Path], *, ours: bool) -> dict[str, str]:
    """Test -> "" where it passed, why it was skipped, or the last line of its failure. Raises RuntimeError where pytest
    did not run to its end."""
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # SGLang's helpers read it, and crash where it is empty
    environment["PYTHONPATH"] = os.pathsep.join((str(BENCH), str(ROOT / "python"), environment.get("PYTHONPATH", "")))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [*("--rootdir", folder, "-c", os.devnull), *(("-p", PLUGIN) if ours else ()), *map(str, files)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode > 1 or not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-500:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": _problem(case) for case in cases}


def _problem(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return f"{child.tag}: {child.get('message', '').strip().splitlines()[0][:150]}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkout of SGLang at the installed release")
    options = parser.parse_args(arguments)
    files = [path for name in FILES if (path := options.folder / TESTS / f"{name}.py").is_file()]
    if not files:
        parser.error(f"{options.folder / TESTS} has none of {', '.join(FILES)}: expected a checkout of SGLang")
    stock, ours = run(files, ours=False), run(files, ours=True)
    rows = []
    for name, found in (("SGLang's", stock), ("ours, exact forms", ours)):
        failed = [problem for problem in found.values() if problem and not problem.startswith("skipped")]
        skipped = [problem for problem in found.values() if problem.startswith("skipped")]
        rows.append((name, str(len(found) - len(failed) - len(skipped)), str(len(failed)), str(len(skipped))))
    print(f"SGLang {sglang_version()}: {', '.join(path.name for path in files)}\n")
    print(*markdown(("cache", "passed", "failed", "skipped"), rows), sep="\n")
    worse = [(test, problem) for test, problem in ours.items() if problem and not stock.get(test)]
    print(*(f"\nonly ours: {test}: {problem}" for test, problem in worse), sep="")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
