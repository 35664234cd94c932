"""Runs of `evicpress bench serve`: a config of bench/configs, an out folder, pictures; goes on where it
was stopped, and begins anew where runs are of another commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from evicbench.paths import BENCH, OUT
from sglang_evicpress.benchmark.environment import commit

_CLI = "import sys; from sglang_evicpress.cli.main import main; sys.exit(main())"


def folder_of(name: str) -> Path:
    return OUT / "serve" / name


def serve(name: str, repetitions: int | None = None) -> None:
    """Make the runs that are missing, of the first ``repetitions`` or all, or all of them where some are of another
    commit. Raises SystemExit where that fails; everything said is shown."""
    config = BENCH / "configs" / f"{name}.yaml"
    command = [sys.executable, "-c", _CLI, "bench", "serve", "--config", str(config), "--out", str(folder_of(name))]
    if repetitions is not None:
        command += ["--repetitions", str(repetitions)]
    if others := commits_of(folder_of(name)) - {commit()}:
        print(f"{name}: the runs of {', '.join(sorted(others))} are put aside, and made anew", flush=True)
        command.append("--fresh")
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def commits_of(folder: Path) -> set[str]:
    """The commits by which the runs in a folder were made."""
    heads = (path.read_bytes().partition(b"\n")[0] for path in folder.glob("runs/*/*.jsonl"))
    return {str(orjson.loads(head).get("run", {}).get("commit")) for head in heads}


def draw(name: str, figures: Sequence[str]) -> None:
    for figure in figures:
        module = f"sglang_evicpress.benchmark.figures.{figure}"
        subprocess.run([sys.executable, "-m", module, str(folder_of(name))], check=True)
