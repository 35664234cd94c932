"""Wheels of SGLang and its needs for a bare GPU machine that has torch 2.11 and Triton 3.6 only.

Pinned wheels for CPython 3.12 on x86-64, unpacked without what Llama and Qwen on FlashInfer or Triton never load.
FA3 of sgl_kernel (1.7 GB) is left out, so a server there must always be told its attention backend.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

SGLANG = "0.5.17"
"""The newest release that runs on torch 2.11."""

WHEELS = (
    *(f"sglang=={SGLANG}", "sglang-kernel==0.4.5", "flashinfer-python==0.6.15.post1", "apache-tvm-ffi==0.1.11"),
    # 5.17 refuses to import beside this SGLang (23 model types clash), and 5.12.1 needs tokenizers <= 0.23.0
    *("transformers==5.12.1", "tokenizers==0.22.2", "compressed-tensors==0.20.0", "loguru==0.7.3", "gguf==0.19.0"),
    *("fastapi==0.165.0", "starlette==1.10.0", "uvicorn==0.54.0", "opentelemetry-api==1.45.2"),
    *("python-multipart==0.0.34", "pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types==0.8.0"),
    *("typing-inspection==0.4.5", "openai==2.6.1", "sniffio==1.3.1", "distro==1.9.0"),
    *("partial-json-parser==0.2.1.1.post7", "orjson==3.13.0", "pybase64==1.5.1", "pyzmq==27.3.0", "msgspec==0.22.0"),
    *("setproctitle==1.3.8", "dill==0.4.1", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
    *("referencing==0.37.0", "rpds-py==2026.9.1"),
)
"""apache-tvm-ffi is pinned because its version is part of the keys of the compiled kernels; so is FlashInfer."""

PYTHON_VERSION = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (38, 35, 34, 31, 28, 27, 26, 24, 17)),
    *("manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux1_x86_64"),
)
"""pip matches each exactly; glibc 2.39 is what the GPU image has."""

LEFT_OUT = re.compile(
    r"""
    sgl_kernel/(flash_ops|flashmla_ops|sm100/|testing/) | triton_kernels/
    | sglang/(multimodal_gen|benchmark)/ | sglang/srt/grpc/_core
    | sglang/jit_kernel/(tests|benchmark|diffusion|trtllm_lora_temp)/
    | sglang/test/(kits|ascend|lora|server_fixtures)/
    | flashinfer/data/cutlass/(examples|python|test|media|docs|cmake)/
    | flashinfer/data/cccl/(python|ci|docs|benchmarks)/
    | flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/.*cubin
    | (build_backend|build_utils)\.py | licensing/ | tools/ | .*/__pycache__/ | [^/]*\.data/
    """,
    re.VERBOSE,
)
"""Kept on purpose: srt/hardware_backend/npu (compressed_tensors imports it), sglang/test/scripted_runtime, and
flashinfer/data/csrc, whose templates are read even for compiled modules."""

STUBS = {
    "IPython/__init__.py": "def get_ipython():\n    return None\n",
    "IPython/display.py": "def display(*args, **kwargs):\n    return None\n\n\nHTML = display\n",
    # parsers of tool calls name its types; a server with `--grammar-backend none` makes none of them
    "xgrammar/__init__.py": "from typing import Any\n\nStructuralTag = Any\nget_model_structural_tag = None\n",
    "xgrammar/structural_tag.py": "from typing import Any\n\n\ndef __getattr__(name):\n    return Any\n",
    "soundfile.py": '"""Audio is not used; the real one without cffi breaks the AutoProcessor of transformers."""\n',
}


def fetch(cache: Path, wheels: Sequence[str] = WHEELS) -> list[Path]:
    """The wheels in ``cache``; what is missing there is downloaded by pip, about 660 MB for all.

    Raises RuntimeError with pip's last line where it cannot get one.
    """
    cache.mkdir(parents=True, exist_ok=True)
    return [_cached(cache, wheel) or _download(cache, wheel) for wheel in wheels]


def unpack(wheel: Path, site: Path) -> int:
    """Unpack what is carried of a wheel; returns how many files were left out."""
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
        carried = [name for name in files if not LEFT_OUT.match(name)]
        archive.extractall(site, carried)
    return len(files) - len(carried)


def write_stubs(site: Path) -> None:
    for name, text in STUBS.items():
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def file_pattern(wheel: str) -> re.Pattern[str]:
    """File name of ``NAME==VERSION``: names are spelled with any of ``-_.``, in any case."""
    name, _, version = wheel.partition("==")
    if not version:
        raise ValueError(f"a wheel must be NAME==VERSION, got {wheel!r}")
    spelled = "[-_.]+".join(re.escape(part) for part in re.split(r"[-_.]+", name))
    return re.compile(rf"{spelled}-{re.escape(version)}-.*\.whl", re.IGNORECASE)


def _cached(cache: Path, wheel: str) -> Path | None:
    pattern = file_pattern(wheel)
    return next((file for file in sorted(cache.glob("*.whl")) if pattern.fullmatch(file.name)), None)


@functools.cache
def _pip() -> tuple[str, ...]:
    """A pip that runs: this Python's, which an environment made by uv has not, or the first other one.

    Raises RuntimeError where there is none.
    """
    for command in ((sys.executable, "-m", "pip"), ("python3", "-m", "pip"), ("pip",), ("uvx", "pip")):
        if shutil.which(command[0]) and not subprocess.run([*command, "--version"], capture_output=True).returncode:
            return command
    raise RuntimeError("packing fetches wheels by pip, and there is none: install python3-pip or uv")


def _download(cache: Path, wheel: str) -> Path:
    command = [*_pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--dest", str(cache)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    print(f"    fetching {wheel}", flush=True)
    done = subprocess.run([*command, wheel], capture_output=True, text=True, check=False)
    found = _cached(cache, wheel)
    if done.returncode or found is None:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(f"{wheel} could not be fetched, pip ended with {done.returncode} and said: {said}")
    return found
