"""Measurements of `make show-tiers`: quick ones first, those that start a server last."""

from __future__ import annotations

from functools import partial

from evicbench.report import Measurement, unjudged
from evicbench.tiers.bandwidth import measure_bandwidth
from evicbench.tiers.chaos import measure_chaos
from evicbench.tiers.fragmentation import measure_fragmentation
from evicbench.tiers.host import measure_host
from evicbench.tiers.identical import measure_identical
from evicbench.tiers.index import measure_index
from evicbench.tiers.kills import measure_kills
from evicbench.tiers.restart import measure_restart
from evicbench.tiers.roundtrip import measure_roundtrip
from evicbench.tiers.ttft import measure_ttft

MEASUREMENTS = {
    "roundtrip": Measurement(measure_roundtrip, partial(measure_roundtrip, 2)),
    "bandwidth": Measurement(measure_bandwidth, unjudged(partial(measure_bandwidth, 3, with_others=False))),
    "host": Measurement(measure_host),
    "fragmentation": Measurement(measure_fragmentation, unjudged(partial(measure_fragmentation, 20_000))),
    "index": Measurement(measure_index, unjudged(partial(measure_index, 20_000))),
    "kills": Measurement(measure_kills, partial(measure_kills, 8)),
    "ttft": Measurement(measure_ttft),
    "restart": Measurement(measure_restart),
    "identical": Measurement(measure_identical),
    "chaos": Measurement(measure_chaos),
}
