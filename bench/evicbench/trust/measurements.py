"""Measurements of `make show-trust`."""

from __future__ import annotations

from functools import partial

from evicbench.report import Measurement, unjudged
from evicbench.trust import behaviours, external, fuzz, ranks, routers, soak

MEASUREMENTS = {
    "view": Measurement(routers.measure_view, partial(routers.measure_view, 24)),
    "router": Measurement(routers.measure_router),
    "store_file": Measurement(external.measure_file, partial(external.measure_file, 4)),
    "store_mooncake": Measurement(external.measure_mooncake),
    "store_nixl": Measurement(external.measure_nixl),
    "store_full": Measurement(external.measure_full),
    "fuzz": Measurement(fuzz.measure, unjudged(partial(fuzz.measure, 20_000))),
    "ranks": Measurement(ranks.measure, partial(ranks.measure_agreement, 60.0)),
    "behaviours": Measurement(behaviours.measure),
    "soak": Measurement(partial(soak.measure, 600.0)),
}
