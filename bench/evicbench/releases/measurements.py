"""Measurements of `make show-releases`: what holds on each release of SGLang that is supported."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from evicbench.correctness import overhead
from evicbench.paths import ROOT
from evicbench.releases import table
from evicbench.report import Line, Measurement, unjudged
from sglang_evicpress.benchmark.environment import commit
from sglang_evicpress.patches.hook_points import DEFAULT_SGLANG, SUPPORTED_SGLANG

MOST_OVERHEAD = 1.03
OTHERS = tuple(version for version in SUPPORTED_SGLANG if version != DEFAULT_SGLANG)


def python_of(version: str) -> Path:
    """The Python of a release's environment, which `make setup` has made."""
    return ROOT / (".venv" if version == DEFAULT_SGLANG else f".venv-{version}") / "bin/python"


@cache
def _commit() -> str:
    """What runs, as it was before the first release had its row written into README."""
    return commit()


def measure_release(version: str) -> Iterator[Line]:
    """The lines of ``evicbench.releases.here``, run by the release's Python."""
    python = python_of(version)
    if version != DEFAULT_SGLANG:
        made = subprocess.run(
            ["make", "setup", f"RELEASE={version}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if made.returncode:
            yield Line(f"{version}: make setup", "an environment", made.stderr[-200:].strip(), False)
            return
    paths = (str(ROOT / "bench"), str(ROOT / "python"), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env["EVICPRESS_COMMIT"] = _commit()
    env["TORCH_EXTENSIONS_DIR"] = str(python.parents[1] / "torch-extensions")  # as `make` does
    command = [str(python), "-m", "evicbench.releases.here"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        where, found = "", dict[str, bool]()
        for line in run.stdout:
            if line.startswith("{"):
                said = json.loads(line)
                where = said.pop("where", where)
                if area := said.pop("area", None):
                    found[area] = found.get(area, True) and said["ok"]
                    yield Line(**said)
            else:
                print(line, end="", flush=True)
    if run.returncode and all(found.values()):
        yield Line(f"{version}: its lines", "measured to their end", f"status {run.returncode}", False)
    table.write_row(ROOT / "README.md", version, table.row(version, found, where))


MEASUREMENTS = {
    **{f"release-{version}": Measurement(partial(measure_release, version)) for version in OTHERS},
    f"release-{DEFAULT_SGLANG}": Measurement(partial(measure_release, DEFAULT_SGLANG)),
    "overhead": Measurement(
        partial(overhead.overhead, pairs=240, most=MOST_OVERHEAD, most_starts=8),
        unjudged(partial(overhead.overhead, pairs=4, most=MOST_OVERHEAD)),
    ),
}
