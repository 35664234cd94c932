"""Measurements of `make show-decode`."""

from __future__ import annotations

from functools import partial

from evicbench.decode_budget import accuracy, backend_and_scratch, capacity, cost, guide, identical, interference
from evicbench.report import Measurement

MEASUREMENTS = {
    "guide": Measurement(guide.measure, guide.measure),
    "backend_and_scratch": Measurement(backend_and_scratch.measure, backend_and_scratch.measure_scratch),
    "cost": Measurement(cost.measure),
    "capacity": Measurement(capacity.measure),
    "interference": Measurement(interference.measure),
    "identical": Measurement(identical.measure, partial(identical.measure, identical.SETUPS[:1])),
    "accuracy": Measurement(accuracy.measure),
}
