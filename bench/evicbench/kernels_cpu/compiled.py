"""Every kernel compiled for sm_80, sm_90 and sm_100 with no GPU present: registers, spills, widths of its accesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import torch
import triton

from evicbench.kernels_cpu.interpreter import kernel_files, parts
from evicbench.paths import out_file
from evicbench.report import Line
from sglang_evicpress.codec.layout import BITS
from sglang_evicpress.kernels import aot
from sglang_evicpress.kernels.aot import ARCHS, DTYPES, HEAD_DIMS, HEADER, Report

WHOLE_ROWS = 128  # bits of the widest access of what reads or writes rows of the pool
SCORES_ONLY = {"page_mean", "select_survivors"}  # these read float32 scores, not rows
MOVES_ROWS = {"compact", "fill_holes", "gather", "scatter", "decode_lossless"}
MOVES_ROWS |= {f"decode_{rows}_{codec}" for rows in ("keys", "values") for codec in BITS}


def device_kernels() -> list[str]:
    """The names of all launches, and of device kernels in the folder that no launch is of."""
    launches = {launch.name: launch.kernel.__name__ for launch in aot.launches(HEAD_DIMS[0], DTYPES[0])}
    kernels = {name for file in kernel_files() for name in parts(import_module(f"sglang_evicpress.kernels.{file}"))[0]}
    return sorted({*launches, *(kernels - set(launches.values()))})


def compile_for(arch: int) -> list[Report]:
    return aot.compile_all(archs=(arch,))


def measure() -> Iterator[Line]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        reports = [report for found in workers.map(compile_for, ARCHS) for report in found]
    head = f"triton {triton.__version__}, torch {torch.__version__}: compiled without a GPU, run on none"
    table = out_file("kernels", "compiled.txt")
    table.write_text("\n".join([head, HEADER, *map(str, reports)]) + "\n", encoding="utf-8")
    yield from lines(reports, device_kernels())
    print(f"    the table of all {len(reports)}: {table}", flush=True)


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
