"""Measurements of `make show-kernels`."""

from __future__ import annotations

from functools import partial

from evicbench.kernels_cpu import backends, compiled, device_reads, interpreter, packing
from evicbench.report import Measurement

MEASUREMENTS = {
    "compiled": Measurement(compiled.measure),
    "interpreter": Measurement(interpreter.measure, partial(interpreter.measure, ("redundancy", "select"))),
    "device_reads": Measurement(device_reads.measure, lambda: [device_reads.views()]),
    "backends": Measurement(backends.measure),
    "packing": Measurement(packing.measure, packing.phases_here),
}
