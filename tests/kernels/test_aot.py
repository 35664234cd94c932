"""Compiles the kernels for a GPU that need not be there, in its own process: here they may be interpreted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

from sglang_evicpress.kernels import aot

COMPILE = """
import dataclasses, json, sys, torch
from sglang_evicpress.kernels.aot import compile_all
reports = compile_all(archs=[int(sys.argv[1])], dtypes=[torch.bfloat16])
print(json.dumps([dataclasses.asdict(report) for report in reports]))
"""
CODECS = ("int8", "int4", "int2")
ENCODES, DECODES = (
    {f"{step}_{rows}_{codec}" for rows in ("keys", "values") for codec in CODECS} for step in ("encode", "decode")
)
READS_THE_POOL = ENCODES | {
    "key_norm", "value_key_ratio", "direction_sum", "key_difference", "window_normalizer", "window_attention",
    "recent_direction", "redundancy", "compact", "fill_holes", "gather", "scatter",
    "encode_lossless", "decode_lossless",
}  # fmt: skip
WRITES_THE_POOL = DECODES | {"compact", "fill_holes", "gather", "scatter", "decode_lossless"}
SCORES_ONLY = {"page_mean", "select_survivors"}


ARCH = 90
"""``make show-kernels`` compiles for others too, and for fp16."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """By kernel, head and dtype."""
    assert ARCH in aot.ARCHS
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-c", COMPILE, str(ARCH)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {(report["kernel"], report["head_dim"], report["dtype"]): report for report in json.loads(done.stdout)}


def test_every_kernel_compiles_without_spilling_a_register(reports):
    every = itertools.product(READS_THE_POOL | WRITES_THE_POOL | SCORES_ONLY, aot.HEAD_DIMS, ("bf16",))
    assert set(reports) == set(every)
    assert {key: report["spill_bytes"] for key, report in reports.items() if report["spill_bytes"]} == {}


def test_rows_of_the_pool_move_in_accesses_of_128_bits(reports):
    widths = {key: (report["load_bits"], report["store_bits"]) for key, report in reports.items()}
    assert {key: load for key, (load, _) in widths.items() if key[0] in READS_THE_POOL and load != 128} == {}
    assert {key: store for key, (_, store) in widths.items() if key[0] in WRITES_THE_POOL and store != 128} == {}


def test_compact_waits_for_all_warps_between_its_loads_and_its_stores(reports):
    orders = [report["order"] for key, report in reports.items() if key[0] == "compact"]
    assert orders
    assert [order for order in orders if "ld bar st" not in order or "ld st" in order] == []


def test_codecs_round_every_step_and_fuse_none(reports):
    """So that what they compute is what torch does on the CPU, bit for bit."""
    coded = {key[0]: report["arithmetic"] for key, report in reports.items() if key[0] in ENCODES | DECODES}
    found = {(kernel.partition("_")[0], arithmetic) for kernel, arithmetic in coded.items()}
    assert found == {
        ("encode", "add.rn.f32 div.rn.f32 mul.rn.f32 sub.rn.f32"),
        ("decode", "add.rn.f32 mul.rn.f32 sub.rn.f32"),
    }


def test_interpreted_kernels_are_not_compiled_by_mistake(monkeypatch):
    monkeypatch.setattr(aot, "IS_INTERPRETED", True)
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        aot.compile_all()
