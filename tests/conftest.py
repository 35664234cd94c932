"""Fixtures of every suite. Where there is no CUDA, Triton kernels run through the interpreter."""

from __future__ import annotations

import ctypes
import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def _num_cuda_devices() -> int:
    """Ask the driver itself: importing torch for it would slow the suites that need none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


# The jit decorator reads this once, so it is set before any test module imports a kernel.
if not _num_cuda_devices():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("EVICPRESS_FORKED_START", "1")  # of servers: see bench/evicbench/testbed/forked_start.py


@pytest.fixture
def device() -> str:
    """Device of Triton kernels in this session: interpreted on the CPU, or compiled on CUDA."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers whichever tests run before; torch only where a test imports it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_unconfigure() -> None:
    """sentencepiece 0.2.1, which SGLang 0.5.23 wants, crashes where pytest ends, as its types are gone before its
    capsule is (google/sentencepiece, issue 1145): the capsule stays."""
    capsule = getattr(sys.modules.get("swig_runtime_data4"), "type_pointer_capsule", None)
    if capsule is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
