"""Makes the runs of settings under load, each in an out folder of its own that goes on where it was stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from foundation.report import Line
from load.promises import promises

from sglang_evicpress.benchmark.raw import Raw, read_raw
from sglang_evicpress.benchmark.tables import setting_lines

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "serve"
GRID = ("load-outside", "load-mooncake", "load-bursts", "load-refusing")
"""Settings of `make bench-load`, each a file of bench/configs."""

FIGURES = ("under_load", "hits", "forms")
_CLI = "import sys; from sglang_evicpress.cli.main import main; sys.exit(main())"


def finished(name: str) -> Raw:
    """Runs of one setting so far. Raises ValueError where there are none."""
    return read_raw(OUT / name)


def serve(name: str, repetitions: int | None = None) -> None:
    """Make the runs that are missing, of the first ``repetitions`` or all, and draw. Raises SystemExit where that
    fails; everything said is shown."""
    config, out = ROOT / "configs" / f"{name}.yaml", OUT / name
    command = [sys.executable, "-c", _CLI, "bench", "serve", "--config", str(config), "--out", str(out)]
    if repetitions is not None:
        command += ["--repetitions", str(repetitions)]
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)
    for figure in FIGURES:
        subprocess.run([sys.executable, str(ROOT / "figures" / f"{figure}.py"), str(out)], check=True)


def measure(name: str, repetitions: int | None = None) -> Iterator[Line]:
    """The lines of one setting, behind its runs."""
    serve(name, repetitions)
    raw = finished(name)
    for line in setting_lines(raw):
        print(f"    {line}", flush=True)
    yield from promises(raw)
