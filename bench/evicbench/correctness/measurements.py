"""Measurements of `make show-foundation`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from evicbench.correctness import exactness, frees, inputs, overhead, peer, readme, stock, storm
from evicbench.report import Line, Measurement
from evicbench.testbed.server import Server

CONTEXTS_PER_CELL = 2  # 36 contexts a server, 144 in all, before those of the paths and partial matches
STORM_SECONDS = 600.0


def measure_exactness() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        yield from exactness.measure_all(Path(folder), CONTEXTS_PER_CELL)


def measure_stock() -> Iterator[Line]:
    yield stock.compare_import()
    lines, details = stock.compare()
    yield from lines
    print(*(f"    {detail}\n" for detail in details[:10]), sep="", end="", flush=True)


def measure_frees(page_sizes: Sequence[int] = frees.PAGE_SIZES) -> Iterator[Line]:
    for page_size in page_sizes:
        with Server(*frees.arguments(page_size)) as server:
            yield frees.measure(server, page_size)


def measure_storm(seconds: float = STORM_SECONDS) -> Iterator[Line]:
    seed = int(time.time())
    for page_size, share in ((1, 0.6), (16, 0.4)):
        outcome = storm.storm(seconds * share, page_size, seed)
        yield storm.line(outcome, page_size, seconds * share)
        print(*(f"    {problem}\n" for problem in outcome.problems[:5]), sep="", end="", flush=True)


def measure_overhead() -> Iterator[Line]:
    yield from overhead.overhead(pairs=80)
    yield overhead.attention_speedup(rounds=9)


MEASUREMENTS = {
    "overhead": Measurement(measure_overhead),
    "exactness": Measurement(measure_exactness),
    "peer": Measurement(peer.measure, peer.measure),
    "stock": Measurement(measure_stock),
    "frees": Measurement(measure_frees, partial(measure_frees, (16,))),
    "inputs": Measurement(inputs.measure),
    "readme": Measurement(readme.measure),
    "storm": Measurement(measure_storm),
}
