"""Measurements of `make show-kernels`."""

from __future__ import annotations

from evicbench.kernels_cpu import backends, compiled, device_reads, interpreter, packing
from evicbench.report import Measurement

MEASUREMENTS = {
    "compiled": Measurement(compiled.measure),
    "interpreter": Measurement(interpreter.measure),
    "device_reads": Measurement(device_reads.measure),
    "backends": Measurement(backends.measure),
    "packing": Measurement(packing.measure),
}
