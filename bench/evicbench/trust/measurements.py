"""Measurements of `make show-trust`."""

from __future__ import annotations

from functools import partial

from evicbench.report import Measurement, unjudged
from evicbench.trust import fuzz, routers

MEASUREMENTS = {
    "view": Measurement(routers.measure_view, partial(routers.measure_view, 24)),
    "router": Measurement(routers.measure_router),
    "fuzz": Measurement(fuzz.measure, unjudged(partial(fuzz.measure, 20_000))),
}
