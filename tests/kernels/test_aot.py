"""Compiles the kernels for a GPU that need not be there, in its own process: here they may be interpreted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from sglang_evicpress.kernels import aot

COMPILE = """
import dataclasses, json, torch
from sglang_evicpress.kernels.aot import compile_all
reports = compile_all(archs=(90,), head_dims=(128,), dtypes=(torch.bfloat16,))
print(json.dumps([dataclasses.asdict(report) for report in reports]))
"""
READS_THE_POOL = {
    "key_norm", "value_key_ratio", "direction_sum", "key_difference", "window_normalizer", "window_attention",
    "recent_direction", "redundancy", "compact", "fill_holes", "gather", "scatter",
}  # fmt: skip
MOVES_ROWS = {"compact", "fill_holes", "gather", "scatter"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {report["kernel"]: report for report in json.loads(done.stdout)}


def test_every_kernel_compiles_without_spilling_a_register(reports):
    assert set(reports) == READS_THE_POOL | {"page_mean", "select_survivors"}
    assert {name: report["spill_bytes"] for name, report in reports.items() if report["spill_bytes"]} == {}


def test_rows_of_the_pool_move_in_accesses_of_128_bits(reports):
    assert {name: reports[name]["load_bits"] for name in READS_THE_POOL} == dict.fromkeys(READS_THE_POOL, 128)
    assert {name: reports[name]["store_bits"] for name in MOVES_ROWS} == dict.fromkeys(MOVES_ROWS, 128)


def test_compact_waits_for_all_warps_between_its_loads_and_its_stores(reports):
    ptx = reports["compact"]["ptx"]
    steps = [found[1] or found[2] for found in re.finditer(r"(ld|st)\.global[.\w:]*\.v4\.|(bar)\.sync", ptx)]
    order = [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]
    assert order[:3] == ["ld", "bar", "st"]


def test_interpreted_kernels_are_not_compiled_by_mistake(monkeypatch):
    monkeypatch.setattr(aot, "IS_INTERPRETED", True)
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        aot.compile_all()
