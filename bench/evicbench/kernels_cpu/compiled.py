"""Every kernel compiled for sm_80, sm_90 and sm_100 with no GPU present: registers, spills, widths of its accesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from evicbench.kernels_cpu.interpreter import kernel_files, parts
from evicbench.paths import OUT
from evicbench.report import Line
from sglang_evicpress.kernels import aot
from sglang_evicpress.kernels.aot import ARCHS, DTYPES, HEAD_DIMS, HEADER, Report

TABLE = OUT / "kernels" / "compiled.txt"
WHOLE_ROWS = 128  # bits of the widest access of what reads or writes rows of the pool
SCORES_ONLY = {"page_mean", "select_survivors"}  # these read float32 scores, not rows
MOVES_ROWS = {"compact", "fill_holes", "gather", "scatter"}


def device_kernels() -> list[str]:
    """The names of all device kernels in the folder, whether they are compiled or not."""
    modules = [import_module(f"sglang_evicpress.kernels.{name}") for name in kernel_files()]
    return sorted({name.removeprefix("_").removesuffix("_kernel") for module in modules for name in parts(module)[0]})


def compile_for(arch: int) -> list[Report]:
    return aot.compile_all(archs=(arch,))


def write_table(reports: Sequence[Report], table: Path = TABLE) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    head = f"triton {triton.__version__}, torch {torch.__version__}: compiled without a GPU, run on none"
    table.write_text("\n".join([head, HEADER, *map(str, reports)]) + "\n", encoding="utf-8")


def measure() -> Iterator[Line]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        reports = [report for found in workers.map(compile_for, ARCHS) for report in found]
    write_table(reports)
    yield from lines(reports, device_kernels())
    print(f"    the table of all {len(reports)}: {TABLE}", flush=True)


def lines(reports: Sequence[Report], kernels: Sequence[str]) -> Iterator[Line]:
    for arch in ARCHS:
        here = [report for report in reports if report.arch.startswith(f"sm_{arch}")]
        spilling = [f"{report.kernel} {report.head_dim} {report.dtype}" for report in here if report.spill_bytes]
        most = max(here, key=lambda report: report.registers)
        yield Line(
            f"compiled for sm_{arch}: {len(kernels)} kernels, head_dim {HEAD_DIMS}, bf16 and fp16",
            f"{len(kernels) * len(HEAD_DIMS) * len(DTYPES)} compiled, 0 spill",
            f"{len(here)} compiled, {len(spilling)} spill {spilling or ''}; most registers {most.registers} "
            f"({most.kernel} {most.head_dim}), most shared memory {max(report.shared_bytes for report in here)} B",
            len(here) == len(kernels) * len(HEAD_DIMS) * len(DTYPES)
            and {report.kernel for report in here} == set(kernels)
            and not spilling,
        )
    rows = [report for report in reports if report.kernel not in SCORES_ONLY]
    narrow = [
        f"{report.kernel} {report.arch} {report.head_dim} {report.dtype}"
        for report in rows
        if report.load_bits < WHOLE_ROWS or (report.kernel in MOVES_ROWS and report.store_bits < WHOLE_ROWS)
    ]
    yield Line(
        "rows of the pool move in wide accesses",
        f"every kernel that reads them loads {WHOLE_ROWS} bits at once, every one that moves them stores as many",
        f"{len(rows)} compiled kernels, narrower: {narrow or 'none'}",
        bool(rows) and not narrow,
    )
    orders = [report.order for report in reports if report.kernel == "compact"]
    wrong = [order for order in orders if "ld bar st" not in order or "ld st" in order]
    yield Line(
        "compact waits for all warps between its loads and its stores (in place, so survivors overlap)",
        "on every target a barrier between each load and the store behind it",
        f"{len(orders) - len(wrong)} of {len(orders)} targets" + (f"; first other: {wrong[0]}" if wrong else ""),
        bool(orders) and not wrong,
    )
