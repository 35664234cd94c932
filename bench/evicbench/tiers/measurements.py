"""Measurements of `make show-tiers`: quick ones first, those that start a server last."""

from __future__ import annotations

from evicbench.report import Measurement
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
    "roundtrip": Measurement(measure_roundtrip),
    "bandwidth": Measurement(measure_bandwidth),
    "host": Measurement(measure_host),
    "fragmentation": Measurement(measure_fragmentation),
    "index": Measurement(measure_index),
    "kills": Measurement(measure_kills),
    "ttft": Measurement(measure_ttft),
    "restart": Measurement(measure_restart),
    "identical": Measurement(measure_identical),
    "chaos": Measurement(measure_chaos),
}
