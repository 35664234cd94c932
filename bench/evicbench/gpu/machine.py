"""The GPU machine: what it is, that it really computes, and how long things take on it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from evicbench.gpu.figures import (
    LIMIT_S,
    Figure,
    Part,
    Sample,
    check,
    print_figure,
    run_parts,
    status_of,
    untimed,
    write_results,
)
from evicbench.gpu.pack import running_commit
from evicbench.paths import ROOT

NO_GPU = 2
PACKAGES = ("sglang", "sglang-kernel", "flashinfer-python", "transformers", "triton", "numpy")


class CannotMeasure(RuntimeError):
    """This machine cannot run the phase; one sentence."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a phase. ``tiny``: small sizes, to see that the script itself works."""

    device: str
    tiny: bool
    only: str
    seconds: float
    seed: int
    out: Path

    @property
    def is_published(self) -> bool:
        """True if its figures may be written down: whole sizes, measured on a GPU."""
        return self.device == "cuda" and not self.tiny


def settings(doc: str | None, arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only the parts whose name holds the word")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="start no part after this (default: 560)")
    parser.add_argument("--seed", type=int, help="of random data (default: another one each time; it is printed)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try the script")
    parser.add_argument("--tiny", action="store_true", help="small sizes, only to try the script")
    given = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4)) if given.seed is None else given.seed
    is_trial = given.device == "cpu" or given.tiny
    default = "out/gpu" if is_trial else time.strftime("results/gpu-%Y-%m-%d", time.gmtime())
    out = Path(os.environ.get("OUT") or ROOT / "bench" / default)
    return Settings(given.device, given.tiny, given.only, given.seconds, seed, out)


def run_phase(phase: str, chosen: Settings, parts: Callable[[], Sequence[Part]]) -> int:
    """Measure, print, and write results after every part where they may be published; the exit status. In a trial only
    what is right or wrong is judged, no time."""
    try:
        machine = describe(chosen.device)
    except CannotMeasure as error:
        print(f"{phase}: {error}", file=sys.stderr)
        return NO_GPU
    print(f"{phase} on {machine['gpu']}, seed {chosen.seed}", flush=True)
    if not chosen.is_published:
        print("a trial of the script: NO FIGURE BELOW IS A RESULT, none is written", flush=True)

    def say(figure: Figure) -> None:
        print_figure(figure if chosen.is_published else untimed(figure))

    def keep(figures: Sequence[Figure]) -> None:
        if chosen.is_published:
            write_results(chosen.out, phase, {**machine, "seed": chosen.seed}, figures)

    figures, is_whole = run_parts(parts(), only=chosen.only, limit_s=chosen.seconds, say=say, keep=keep)
    if chosen.is_published:
        print(f"table: {chosen.out / f'{phase}.md'}")
    else:
        figures = [untimed(figure) for figure in figures]
    num_missed, num_left = sum(each.ok is False for each in figures), sum(each.value is None for each in figures)
    print(f"{phase}: {len(figures)} lines, {num_missed} missed, {num_left} not measured")
    return status_of(figures, is_whole)


def describe(device: str) -> dict[str, Any]:
    """Names and versions that belong to a figure. Raises CannotMeasure where there is no GPU that computes."""
    found: dict[str, Any] = {"gpu": "none (CPU)", "driver": "none"}
    if device == "cuda":
        if "libcudart" in os.environ.get("LD_PRELOAD", ""):
            raise CannotMeasure("the CUDA runtime is replaced by LD_PRELOAD: expected a real GPU")
        if not torch.cuda.is_available():
            raise CannotMeasure("torch finds no CUDA device: expected an NVIDIA GPU and its driver")
        numbers = torch.randn(4096, dtype=torch.float64)
        if not torch.equal((numbers.cuda() * 2 + 1).cpu(), numbers * 2 + 1):
            raise CannotMeasure("the CUDA device does not compute: expected a real GPU")
        its = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{its.name} ({its.multi_processor_count} SMs, {its.total_memory >> 30} GiB)"
        found["driver"] = _driver()
    carry = os.environ.get("EVICPRESS_CARRY")
    found |= {"commit": running_commit(ROOT, carry), "python": platform.python_version(), "torch": torch.__version__}
    found |= {name: _version(name) for name in PACKAGES}
    found |= {"cpus": os.cpu_count(), "kernel": platform.release()}
    return found | {"when": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# ---- time


def time_calls(call: Callable[[], object], device: str, *, repeats: int = 20, warm_up: int = 3) -> Sample:
    """Seconds of each call: between CUDA events around it on the GPU, by the clock on the CPU."""
    for _ in range(warm_up):
        call()
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(repeats):
            call()
            times.append(time.perf_counter())
        return Sample(tuple(after - before for before, after in pairwise(times)))
    torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return Sample(tuple(start.elapsed_time(end) / 1e3 for start, end in pairs))


def main() -> int:
    """`run.sh boot`: say what is there, and that SGLang can be imported and finds the plugin."""
    try:
        machine = describe("cuda")
    except CannotMeasure as error:
        print(f"boot: {error}", file=sys.stderr)
        return NO_GPU
    for name, value in machine.items():
        print(f"    {name:18} {value}")
    import sgl_kernel

    importlib.import_module("sglang.srt.server_args")  # what a server imports first
    print(f"    sgl_kernel         {sgl_kernel.__file__}")
    plugins = [point.name for point in importlib.metadata.entry_points(group="sglang.srt.plugins")]
    found = check("plugin is found", "evicpress" in plugins, str(plugins), "evicpress")
    print_figure(found)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
