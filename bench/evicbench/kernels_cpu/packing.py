"""The script for a GPU machine, as far as one without can run it: packing for real, what is in the packed folder, and
what its other phases say here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evicbench.gpu.pack import differing
from evicbench.paths import ROOT
from evicbench.report import Line

SCRIPT = ROOT / "bench" / "evicbench" / "gpu" / "run.sh"
LIMIT_MIB = 64
MIB = 1 << 20
SOURCES = ("python/sglang_evicpress", "kernels", "patches", "bench/evicbench/gpu")
SITE = ("sglang/launch_server.py", "sgl_kernel/__init__.py", "flashinfer/__init__.py")
PHASES = ("correctness", "speed", "server", "all")
NO_GPU = 2


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "EVICPRESS_PYTHON": sys.executable}
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False, env=env)


def absent(folder: Path) -> tuple[int, list[str]]:
    """Number of files of the packed source, and the files that a GPU machine needs and the folder lacks."""
    with tarfile.open(folder / "source.tar.xz", "r:xz") as archive:
        source = archive.getnames()
    with tarfile.open(folder / "site.tar.xz", "r:xz") as archive:
        site = set(archive.getnames())
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", *SOURCES], capture_output=True, text=True, check=True)
    missing = sorted(set(tracked.stdout.split()) - set(source)) + [name for name in SITE if name not in site]
    if not any(name.startswith("sglang_evicpress") and name.endswith("entry_points.txt") for name in site):
        missing.append("the plugin's entry points")
    return len(source), missing


def booted(folder: Path) -> tuple[bool, str]:
    """Run boot.sh on the folder in an empty environment, under run.sh's strict settings. This Python stands for
    the one on the GPU machine, so its check of versions is passed over and nothing is compiled."""
    stub = folder.parent / "python-there"
    skipped = 'if [ "$*" = - ]; then cat >/dev/null; exit 0; fi\nif [ "${2:-}" = compileall ]; then exit 0; fi\n'
    stub.write_text(f'#!/bin/sh\n{skipped}exec {sys.executable} "$@"\n')
    stub.chmod(0o755)
    script = f'. "{folder}/boot.sh" && test -e "$EVICPRESS_SOURCE/python/sglang_evicpress/kernels/compact.py"'
    env = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "EVICPRESS_PYTHON": str(stub)}
    env["EVICPRESS_PLACE"] = str(folder.parent / "there")
    command = ["bash", "-u", "-o", "pipefail", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return done.returncode == 0, (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]


def packed() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "carry")
        done = run("pack", "--out", str(folder), "--limit-mib", str(LIMIT_MIB))
        if done.returncode:
            raise RuntimeError(f"run.sh pack ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        size = sum(file.stat().st_size for file in folder.iterdir())
        manifest = json.loads((folder / "manifest.json").read_text())
        different = differing(ROOT, folder / "source.tar.xz")
        count, lacking = absent(folder)
        is_up, said = booted(folder)
    yield Line(
        f"run.sh pack: {len(manifest['wheels'])} pinned wheels, this repository, model shapes, scripts",
        f"at most {LIMIT_MIB} MiB in all",
        f"{size / MIB:.1f} MiB, at {manifest['commit']}",
        0 < size <= LIMIT_MIB * MIB,
    )
    yield Line(
        "what was packed",
        "every file of the package, kernels, patches and GPU scripts, byte for byte; SGLang, its kernels, the plugin",
        f"{count} files of this repository, not as here: {different[:3] or 'none'}; lacking: {lacking or 'nothing'}",
        count > 0 and not different and not lacking,
    )
    yield Line(
        "boot.sh on the packed folder, in an empty environment, with this Python in the place of the GPU machine's",
        "unpacks all, links intact, status 0",
        said.replace(str(folder.parent), "..."),
        is_up,
    )


def phases() -> Line:
    """Refusals of the phases without a GPU."""
    wrong = []
    for phase in PHASES:
        done = run(phase)
        said = done.stderr.strip().splitlines()
        if done.returncode != NO_GPU or len(said) != 1 or "GPU" not in said[0]:
            wrong.append(f"{phase}: status {done.returncode}, {said[-1:] or 'nothing said'}")
    return Line(
        f"run.sh {', '.join(PHASES)} on a machine without a GPU",
        f"status {NO_GPU} and one sentence that says why",
        f"{len(PHASES) - len(wrong)} as promised; otherwise: {wrong or 'none'}",
        not wrong,
    )


def measure() -> Iterator[Line]:
    yield from packed()
    yield from phases_here()


def phases_here() -> Iterator[Line]:
    if Path("/dev/nvidiactl").exists():
        print("    there is a GPU here: run bench/evicbench/gpu/run.sh all", flush=True)
    else:
        yield phases()
