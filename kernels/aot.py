"""Compiles every kernel for CUDA with no GPU present and reports what the assembler says of it.

``python -m sglang_evicpress.kernels.aot`` prints the table and ends with status 1 when a kernel spills.
Compiled and interpreted kernels exclude each other in one process: run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_evicpress.codec.layout import BITS, layout_of
from sglang_evicpress.kernels import (
    compact,
    fill_holes,
    group_codec,
    lossless_codec,
    redundancy,
    score,
    select,
    stage,
    window_attention,
)
from sglang_evicpress.kernels.pool import IS_INTERPRETED, move_constants, tile_constants

ARCHS = (80, 90, 100)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
_NUM_LAYERS, _NUM_HEADS, _QUERY_HEADS, _WINDOW, _PAGE = 32, 8, 32, 32, 16  # Llama-3.1-8B, window of SnapKV
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as its launcher calls it: type of every run-time argument, launch constants."""

    name: str
    kernel: triton.JITFunction
    signature: dict[str, str]
    constants: dict[str, object]


@dataclass(frozen=True, slots=True)
class Report:
    """Resources of one kernel on one architecture; widths are those of its widest global access in bits, ``order`` that
    of its wide loads (ld), barriers (bar) and wide stores (st), repeats left out. ``arithmetic``: its operations on
    float32 that round, each once."""

    kernel: str
    arch: str
    head_dim: int
    dtype: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int
    store_bits: int
    order: str
    arithmetic: str

    def __str__(self) -> str:
        return (
            f"{self.kernel:18} {self.arch:8} {self.head_dim:4} {self.dtype:5} {self.registers:5} "
            f"{self.spill_bytes:6} {self.shared_bytes:7} {self.load_bits:5} {self.store_bits:6}"
        )


HEADER = f"{'kernel':18} {'arch':8} {'dim':>4} {'dtype':5} {'regs':>5} {'spill':>6} {'shared':>7} load_b store_b"


def launches(head_dim: int, dtype: torch.dtype) -> Iterator[Launch]:
    """Every kernel with the default constants of its launcher, for a pool of this head and dtype."""
    pool = {"k_table": "*u64", "slots": "*i64"}
    tile = tile_constants(_NUM_HEADS, head_dim, dtype)
    tokens, nodes = {"out": "*fp32", "num_tokens": "i32"}, {"num_nodes": "i32"}
    yield Launch("key_norm", score._key_norm_kernel, pool | tokens, tile)
    yield Launch("value_key_ratio", score._value_key_ratio_kernel, pool | {"v_table": "*u64"} | tokens, tile)
    chunk: dict[str, object] = {"CHUNK": score.CHUNK_TOKENS}
    large = tile_constants(_NUM_HEADS, head_dim, dtype, score.DIFFERENCE_TILE)
    yield Launch("direction_sum", score._direction_sum_kernel, pool | nodes | tokens, large | chunk)
    anchored = pool | nodes | {"anchors": "*fp32"} | tokens
    yield Launch("key_difference", score._key_difference_kernel, anchored, large)
    recent = pool | nodes | {"recent": "*i32", "out": "*fp32", "num_tokens": "i32", "num_recent": "i32"}
    yield Launch("recent_direction", redundancy._recent_direction_kernel, recent, tile)
    yield Launch("redundancy", redundancy._redundancy_kernel, anchored, tile)
    page = {"scores": "*fp32", "num_pages": "i32"}
    yield Launch("page_mean", score._page_mean_kernel, page | tokens, score.page_constants(_PAGE))
    window = {"queries": f"*{_TYPES[dtype]}", "query_positions": "*i64", "key_positions": "*i32"}
    window |= {"num_queries": "i32", "scale": "fp32"} | pool | nodes | tokens
    rows = window_attention.window_constants(_WINDOW, _QUERY_HEADS, _NUM_HEADS, head_dim, dtype)
    chunk = {"CHUNK": window_attention.CHUNK_TOKENS}
    yield Launch("window_normalizer", window_attention._window_normalizer_kernel, window, rows | chunk)
    window |= {"normalizers": "*fp32"}
    yield Launch("window_attention", window_attention._window_attention_kernel, window, rows)
    kept = {"scores": "*fp32", "out": "*i32", "num_tokens": "i32", "num_kept": "i32"}
    yield Launch("select_survivors", select._select_survivors_kernel, kept, select.SELECT_CONSTANTS)
    moves = {"table": "*u64", "slots": "*i64", "survivors": "*i32", "num_slots": "i32", "num_kept": "i32"}
    constants = move_constants(_NUM_LAYERS, _NUM_HEADS, head_dim, dtype, compact.TILE_BYTES)
    yield Launch("compact", compact._compact_kernel, moves, constants)
    moves = {"table": "*u64", "slots": "*i64", "targets": "*i32", "sources": "*i32", "num_moves": "i32"}
    constants = move_constants(_NUM_LAYERS, _NUM_HEADS, head_dim, dtype, fill_holes.TILE_BYTES)
    yield Launch("fill_holes", fill_holes._fill_holes_kernel, moves, constants)
    rows = stage.stage_constants(_NUM_HEADS * head_dim * dtype.itemsize)
    copies = {"table": "*u64", "slots": "*i64", "staged": "*i32", "num_slots": "i32"}
    yield Launch("gather", stage._stage_kernel, copies, {"IS_GATHER": True, **rows})
    yield Launch("scatter", stage._stage_kernel, copies, {"IS_GATHER": False, **rows})
    to_rows = {"table": "*u64", "slots": "*i64", "stored": "*u8"}
    to_rows |= dict.fromkeys(group_codec.SIZES, "i32")
    for codec in BITS:
        layout = layout_of(codec, _WINDOW, _NUM_HEADS * head_dim, dtype.itemsize)
        keys, values = group_codec.group_constants(layout, dtype)
        encoded = to_rows | {"flag": "*i32"}
        yield Launch(f"encode_keys_{codec}", group_codec._encode_keys_kernel, encoded, keys)
        yield Launch(f"encode_values_{codec}", group_codec._encode_values_kernel, encoded, values)
        yield Launch(f"decode_keys_{codec}", group_codec._decode_keys_kernel, to_rows, keys)
        yield Launch(f"decode_values_{codec}", group_codec._decode_values_kernel, to_rows, values)
    # Words of 16 bits, whichever dtype: the codec's launcher takes bfloat16 alone.
    constants = dict(lossless_codec.lossless_constants(_NUM_HEADS * head_dim))
    encoded = to_rows | {"flag": "*i32"}
    yield Launch("encode_lossless", lossless_codec._encode_lossless_kernel, encoded, constants)
    yield Launch("decode_lossless", lossless_codec._decode_lossless_kernel, to_rows, constants)


def compile_launch(launch: Launch, arch: int, head_dim: int, dtype: torch.dtype) -> Report:
    """Compile one kernel for ``sm_<arch>`` and read the assembler's log of the same PTX."""
    constants = dict(launch.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in constants}
    parameters = launch.kernel.params
    signature = {parameter.name: launch.signature.get(parameter.name, "constexpr") for parameter in parameters}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, parameter in enumerate(parameters)
        if signature[parameter.name][0] == "*" and not parameter.do_not_specialize_on_alignment
    }
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    if target is None:
        raise RuntimeError(f"no target in the PTX of {launch.name}")
    log = _assemble(ptx, target[1], arch)
    return Report(
        kernel=launch.name,
        arch=target[1],
        head_dim=head_dim,
        dtype=_TYPES[dtype],
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        shared_bytes=compiled.metadata.shared,
        load_bits=_widest("ld", ptx),
        store_bits=_widest("st", ptx),
        order=_order(ptx),
        arithmetic=" ".join(sorted(set(re.findall(r"\b((?:fma|mul|add|sub|div|rcp)\.[\w.]*f32)(?:x2)?\b", ptx)))),
    )


def compile_all(
    archs: Sequence[int] = ARCHS, head_dims: Sequence[int] = HEAD_DIMS, dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Report]:
    """Compile every kernel for every architecture, head and dtype; about 0.4 s each, cached by Triton.

    Raises RuntimeError when the kernels were imported interpreted, or when the assembler fails.
    """
    if IS_INTERPRETED:
        raise RuntimeError("interpreted kernels cannot be compiled: unset TRITON_INTERPRET")
    return [
        compile_launch(launch, arch, head_dim, dtype)
        for arch in archs
        for head_dim in head_dims
        for dtype in dtypes
        for launch in launches(head_dim, dtype)
    ]


def _assemble(ptx: str, target: str, arch: int) -> str:
    tool = (triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [tool, "-v", f"--gpu-name={target}", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas failed for {target}: {done.stderr}")
    return done.stderr


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(f"ptxas said nothing like {pattern!r}: {log}")
    return int(found[1])


def _widest(access: str, ptx: str) -> int:
    """Bits of the widest ``ld.global`` or ``st.global``, asynchronous copies to shared memory included."""
    found = re.findall(rf"{access}\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    widths = [int(lanes or 1) * int(bits) for lanes, bits in found]
    if access == "ld":
        widths += [8 * int(size) for size in re.findall(r"cp\.async\.c\w\.shared\.global[^;]*?, 0x(\w+)", ptx)]
    return max(widths, default=0)


def _order(ptx: str) -> str:
    found = [match[1] or match[2] for match in re.finditer(r"(ld|st)\.global[.\w:]*\.v4\.|(bar)\.sync", ptx)]
    return " ".join(step for index, step in enumerate(found) if index == 0 or step != found[index - 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a kernel spills registers."""
    parser = argparse.ArgumentParser(prog="python -m sglang_evicpress.kernels.aot", description=main.__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), help="compute capabilities, such as 90")
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    options = parser.parse_args(arguments)
    print(f"triton {triton.__version__}, torch {torch.__version__}: compiled without a GPU, run on none")
    print(HEADER)
    reports = compile_all(options.arch, options.head_dim)
    for report in reports:
        print(report)
    spilling = sum(report.spill_bytes > 0 for report in reports)
    print(f"{len(reports)} compiled, {spilling} spill")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
