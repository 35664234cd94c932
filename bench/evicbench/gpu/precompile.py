"""Compile for Hopper, without a GPU, the kernels that FlashInfer and SGLang would compile in the first forward there.

    PYTHONPATH=bench python -m evicbench.gpu.precompile OUT [NAME ...]       # then: run.sh pack --compiled OUT

Needs nvcc 13.0, and FlashInfer, SGLang and apache-tvm-ffi in the packed versions: these are part of the keys by which
compiled kernels are found. What is not carried is compiled on the GPU machine. CPU seconds are printed: prefill-fa3 and
prefill-fa3-half take about 500 each, all others together about 400.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HEADERS = ("cublas", "curand", "cusparse", "cusolver", "cufft", "nvrtc")
KV_ROW_BYTES = 2048  # 8 kv heads of 128 in 16 bits: Llama-3.1-8B and Qwen2.5-14B


def builders() -> dict[str, Callable[[], object]]:
    """By name, what compiles one module. Sizes are those of the served models: bfloat16, heads of 128."""
    import torch
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.norm import gen_norm_module
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    def prefill(kind: str, dtype: torch.dtype, dim: int) -> Callable[[], object]:
        given = kind, dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, False
        return lambda: gen_batch_prefill_module(*given).build(False)

    def decode(dtype: torch.dtype, dim: int) -> Callable[[], object]:
        return lambda: gen_batch_decode_module(dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False).build(False)

    half, brain = torch.float16, torch.bfloat16
    return {
        "norm": lambda: gen_norm_module().build(False),
        "cascade": lambda: gen_cascade_module().build(False),
        "prefill-fa2": prefill("fa2", brain, 128),
        "store": lambda: _jit_kvcache_module(KV_ROW_BYTES, KV_ROW_BYTES),
        "rope": lambda: _jit_fused_rope_module(True, 128, brain, brain),
        "activation": lambda: activation_module(brain),
        "clamp": lambda: _jit_clamp_position_module(torch.int64),
        # what the greedy check serves: the testbed's model in float16
        "prefill-fa2-half": prefill("fa2", half, 64),
        "decode-half": decode(half, 64),
        "prefill-fa3": prefill("fa3", brain, 128),
        "prefill-fa3-half": prefill("fa3", half, 64),
    }


def compile_modules(out: Path, names: Sequence[str]) -> None:
    os.environ |= {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(out / "flashinfer"),
        "FLASHINFER_USE_CUDA_NORM": "1",
        "TVM_FFI_CACHE_DIR": str(out / "tvm"),
    }
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    for name, folder in (("CPATH", _headers(out / "include")), ("LIBRARY_PATH", _driver_stub(out / "lib"))):
        os.environ[name] = os.pathsep.join(filter(None, (os.environ.get(name), str(folder))))
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch

    known = builders()
    with override_jit_cuda_arch(9, 0):
        for name in names or known:
            begin, used = time.monotonic(), _cpu_seconds()
            known[name]()
            print(f"    {name}: {time.monotonic() - begin:.0f} s, {_cpu_seconds() - used:.0f} s of CPU", flush=True)


def _headers(links: Path) -> Path:
    """A folder of those headers of torch's CUDA packages that nvcc's own toolkit lacks; a whole one may break nvcc."""
    import torch

    links.mkdir(parents=True, exist_ok=True)
    toolkit = Path(os.environ["CUDA_HOME"]) / "include"
    for header in (Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include").glob("*.h"):
        link = links / header.name
        if header.name.startswith(HEADERS) and not (toolkit / header.name).exists() and not link.exists():
            link.symlink_to(header)
    return links


def _driver_stub(folder: Path) -> Path:
    """A folder with an empty libcuda.so to link with, where there is no driver; what is linked finds the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so")]
    subprocess.run(command, check=True)
    return folder


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder that gets flashinfer/ and tvm/")
    parser.add_argument("names", nargs="*", help="modules to compile (default: all)")
    options = parser.parse_args(arguments)
    compile_modules(options.out.resolve(), options.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
