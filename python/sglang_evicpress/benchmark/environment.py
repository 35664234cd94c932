"""Provenance of results: machine, versions, commit, load."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_PACKAGES = ("sglang", "torch", "sglang-evicpress")
_QUESTION_S = 30.0


def environment(command: str) -> dict[str, object]:
    """``started`` is now, in UTC."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"command": command, **provenance(), "started": started}


def provenance() -> dict[str, object]:
    """The part that every run names: runs that differ in it are not of one measurement."""
    return {
        "versions": {**{name: _version(name) for name in _PACKAGES}, "python": platform.python_version()},
        "commit": commit(),
        "machine": machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
    }


def commit() -> str:
    """The commit of this package's checkout, marked when files differ from it; ``unknown`` outside one."""
    words = ("git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    return _said(words, Path(__file__).parent) or "unknown"


def machine() -> str:
    """The processor, the memory and, where there are any, the GPUs with their driver."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(models, "") or platform.machine()
    gib = psutil.virtual_memory().total / 2**30
    gpus = _said(("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"), Path("/"))
    return "; ".join((processor, f"{gib:.0f} GiB", *gpus.splitlines()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _said(command: tuple[str, ...], folder: Path) -> str:
    """Output of a program; empty when it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_QUESTION_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
