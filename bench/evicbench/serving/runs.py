"""Runs of `evicpress bench serve`: a config of bench/configs, an out folder, pictures; goes on where it was stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from evicbench.paths import BENCH, OUT

_CLI = "import sys; from sglang_evicpress.cli.main import main; sys.exit(main())"


def folder_of(name: str) -> Path:
    return OUT / "serve" / name


def serve(name: str, repetitions: int | None = None) -> None:
    """Make the runs that are missing, of the first ``repetitions`` or all. Raises SystemExit where that fails;
    everything said is shown."""
    config = BENCH / "configs" / f"{name}.yaml"
    command = [sys.executable, "-c", _CLI, "bench", "serve", "--config", str(config), "--out", str(folder_of(name))]
    if repetitions is not None:
        command += ["--repetitions", str(repetitions)]
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def draw(name: str, figures: Sequence[str]) -> None:
    for figure in figures:
        module = f"sglang_evicpress.benchmark.figures.{figure}"
        subprocess.run([sys.executable, "-m", module, str(folder_of(name))], check=True)
