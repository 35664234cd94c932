"""Measurements of `make show-kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from evicbench.kernels_cpu import backends, compiled, interpreter, packing
from evicbench.pytest_runs import passed
from evicbench.report import Line, Measurement

DEVICE_READS = "tests/contract/attention/test_no_device_reads.py"
"""Tests on torch's meta device, which has shapes but no data, so that whatever reads data of it on the host raises."""


def measure_view() -> Iterator[Line]:
    yield passed(
        "the view of a step with holes: reads of device data by the host (decode, extend and mixed)",
        "0, with the right lengths on both sides, and the control, a read on purpose, is seen",
        *(DEVICE_READS, "-k", "a_step_from or control"),
    )


def measure_device_reads() -> Iterator[Line]:
    yield from measure_view()
    yield passed(
        "the hooks that run in every step, on tensors without data: rows, holes, queries, budgets, loads",
        "every case reads nothing of the device",
        DEVICE_READS,
        interpreted=True,
    )


MEASUREMENTS = {
    "compiled": Measurement(compiled.measure),
    "interpreter": Measurement(interpreter.measure, partial(interpreter.measure, ("redundancy", "select"))),
    "device_reads": Measurement(measure_device_reads, measure_view),
    "backends": Measurement(backends.measure),
    "packing": Measurement(packing.measure, packing.phases_here),
}
