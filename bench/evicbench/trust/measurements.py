"""Measurements of `make show-trust`."""

from __future__ import annotations

from functools import partial

from evicbench.report import Measurement, unjudged
from evicbench.trust import behaviours, fuzz, ranks, routers, soak

MEASUREMENTS = {
    "view": Measurement(routers.measure_view, partial(routers.measure_view, 24)),
    "router": Measurement(routers.measure_router),
    "fuzz": Measurement(fuzz.measure, unjudged(partial(fuzz.measure, 20_000))),
    "ranks": Measurement(ranks.measure, partial(ranks.measure_agreement, 60.0)),
    "behaviours": Measurement(behaviours.measure),
    "soak": Measurement(partial(soak.measure, 600.0)),
}
