"""Measurements of `make show-tiers`: quick ones first, those that start a server last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from evicbench.pytest_runs import passed
from evicbench.report import Line, Measurement, unjudged
from evicbench.tiers import bandwidth, chaos, fragmentation, host, identical, index, kills, restart, ttft

PAYLOADS = ("tests/unit/tiers/entry/test_payload.py", "-k", "bit_for_bit or random_walk")


def measure_roundtrip(*more: str) -> Iterator[Line]:
    yield passed(
        "random KV of every dtype of a pool through payloads; random walks of the cache over host memory and SSD",
        "every bit is back, wherever it has been",
        *(*PAYLOADS, *more),
    )


MEASUREMENTS = {
    "roundtrip": Measurement(partial(measure_roundtrip, "tests/contract/tiers/test_tiers_model.py"), measure_roundtrip),
    "bandwidth": Measurement(bandwidth.measure, unjudged(partial(bandwidth.measure, 3, with_others=False))),
    "host": Measurement(host.measure),
    "fragmentation": Measurement(fragmentation.measure, unjudged(partial(fragmentation.measure, 20_000))),
    "index": Measurement(index.measure, unjudged(partial(index.measure, 20_000))),
    "kills": Measurement(kills.measure, partial(kills.measure, 8)),
    "ttft": Measurement(ttft.measure),
    "restart": Measurement(restart.measure),
    "identical": Measurement(identical.measure),
    "chaos": Measurement(chaos.measure),
}
