"""Lines about the SGLang that runs this program: correctness at a size that fits 12 minutes, and salts.

`python -m evicbench.releases.here` prints each as one line of JSON, with its area, after one that says where it runs:
`make show-releases` runs it in the environment of each release.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path

from evicbench.correctness import exactness, stock, storm
from evicbench.correctness.exactness import one_compressed_node
from evicbench.correctness.findings import summary
from evicbench.correctness.reference import Reference, make_peaky_model
from evicbench.decode_budget import identical
from evicbench.paths import ROOT
from evicbench.pytest_runs import passed
from evicbench.releases import salts
from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.tiers import restart
from sglang_evicpress.benchmark.environment import commit
from sglang_evicpress.patches.hook_check import sglang_version

FORMS = ("keydiff@0.5", "snapkv@0.5", "value_key_ratio@0.5")
CONTEXTS_PER_FORM = 4
NUM_ASKS = NUM_PROMPTS = 30
STORM_SECONDS = 180.0
CONTRACT = (
    *("tests/contract/test_hook_points.py", "tests/contract/test_compat.py", "tests/contract/test_server_args.py"),
    *("tests/contract/cache", "tests/contract/scheduler", "tests/contract/attention", "tests/contract/http"),
)
OURS = "sglang-evicpress"


def measure_exactness(page_sizes: Sequence[int] = (1, 16)) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_peaky_model(Path(folder))
        reference = Reference(model)
        for page_size in page_sizes:
            jobs = (
                (f"{form} #{index}", partial(one_compressed_node, form=form))
                for form in FORMS
                for index in range(CONTEXTS_PER_FORM)
            )
            with Server(*exactness.server_arguments(page_size), model=model) as server:
                findings = exactness.run_jobs(server, reference, page_size, jobs)
            yield summary(f"exactness: {', '.join(FORMS)}, page size {page_size}", findings)


def measure_stock() -> Iterator[Line]:
    lines, details = stock.compare(NUM_ASKS, NUM_PROMPTS)
    yield from lines
    print(*details[:5], sep="\n", file=sys.stderr)


def measure_restart() -> Iterator[Line]:
    yield from restart.measure(with_others=False)


def measure_install() -> Iterator[Line]:
    """What `pip install .` would do in this environment: its own package only."""
    uv = next((path for path in (ROOT / ".tools/bin/uv", ROOT / ".tools/uv") if path.exists()), Path("uv"))
    command = [str(uv), "pip", "install", "--dry-run", "--reinstall-package", OURS, "--python", sys.executable, "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    changes = [line.strip() for line in run.stderr.splitlines() if line.strip()[:2] in ("+ ", "- ", "~ ")]
    others = [change for change in changes if OURS not in change]
    yield Line(
        "install: `uv pip install --dry-run .` in this environment",
        f"changes {OURS} and no other package",
        ", ".join(others) or f"{len(changes)} changes, of {OURS}" if run.returncode == 0 else run.stderr[-200:],
        run.returncode == 0 and bool(changes) and not others,
    )


def measure_contract() -> Iterator[Line]:
    what = "contract: hook rows, flags, cache, scheduler, attention's inputs, routes"
    yield passed(what, "all pass", "-n", "2", "--dist", "loadfile", *CONTRACT)


def measure_storm() -> Iterator[Line]:
    yield storm.measure(16, STORM_SECONDS, random.SystemRandom().randrange(1 << 30))


MEASURES = {
    "install": measure_install,
    "contract": measure_contract,
    "exactness": measure_exactness,
    "stock": measure_stock,
    "salts": salts.measure,
    "restart": measure_restart,
    "budgets": partial(identical.measure, identical.SETUPS[:1]),
    "storm": measure_storm,
}
QUICK = {**MEASURES, "exactness": partial(measure_exactness, (16,))}


def _where() -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch = metadata.version("torch").partition("+")[0]
    at, day = os.environ.get("EVICPRESS_COMMIT") or commit(), time.strftime("%Y-%m-%d", time.gmtime())
    return f"torch {torch}, Python {python}; {at}, {day}"


def main() -> int:
    """Status 1 where a line is not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(MEASURES)}; all where none is named")
    parser.add_argument("--quick", action="store_true", help="exactness with pages of 16 only")
    words = parser.parse_args()
    measures = QUICK if words.quick else MEASURES
    version, is_ok = sglang_version(), True
    print(json.dumps({"where": _where()}), flush=True)
    for name in words.areas or measures:
        begin = time.monotonic()
        try:
            lines = list(measures[name]())
        except (RuntimeError, OSError) as error:  # a server that does not start
            lines = [Line(name, "measured to its end", f"{type(error).__name__}: {error}"[:300], False)]
        is_ok = is_ok and all(line.ok is not False for line in lines)
        for line in lines:
            fields = asdict(line)
            print(json.dumps({**fields, "area": name, "what": f"{version}: {line.what}"}), flush=True)
        print(f"    {version}, {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
