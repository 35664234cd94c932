"""Measurements of `make show-foundation`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from evicbench.correctness import exactness, frees, layer_groups, overhead, readme, stock, storm
from evicbench.pytest_runs import passed
from evicbench.report import Line, Measurement
from evicbench.testbed.server import Server

CONTEXTS_PER_CELL = 2  # 36 contexts a server, 144 in all, before those of the paths and partial matches
STORM_SECONDS = 600.0


def measure_stock() -> Iterator[Line]:
    yield stock.compare_import()
    lines, details = stock.compare()
    yield from lines
    print(*(f"    {detail}\n" for detail in details[:10]), sep="", end="", flush=True)


def measure_selections() -> Iterator[Line]:
    """The tests that compare with the golden file kvpress made, and those that show where we differ on purpose."""
    yield passed(
        "scores: keydiff, knorm and snapkv select what kvpress 0.5.5 selects (golden file), differences are named",
        "every comparison equal, none skipped",
        *("-k", "kvpress", "tests/unit/press"),
    )


def measure_inputs() -> Iterator[Line]:
    yield passed(
        "bad input: every refusal of the command line, a config file, a program and a model",
        "status 2, one sentence naming the value and what is accepted",
        *("-k", "refus or argparse", "tests/contract/test_server_args.py"),
    )


def measure_frees(page_sizes: Sequence[int] = frees.PAGE_SIZES) -> Iterator[Line]:
    for page_size in page_sizes:
        with Server(*frees.arguments(page_size)) as server:
            yield frees.measure(server, page_size)


def measure_storm(seconds: float = STORM_SECONDS) -> Iterator[Line]:
    seed = int(time.time())
    yield storm.measure(1, 0.6 * seconds, seed)
    yield storm.measure(16, 0.4 * seconds, seed)


def measure_overhead() -> Iterator[Line]:
    yield from overhead.overhead(pairs=80)
    yield overhead.attention_speedup(rounds=9)


MEASUREMENTS = {
    "overhead": Measurement(measure_overhead),
    "layer_groups": Measurement(layer_groups.measure),
    "exactness": Measurement(partial(exactness.measure_all, CONTEXTS_PER_CELL)),
    "peer": Measurement(measure_selections, measure_selections),
    "stock": Measurement(measure_stock),
    "frees": Measurement(measure_frees, partial(measure_frees, (16,))),
    "inputs": Measurement(measure_inputs),
    "readme": Measurement(readme.measure),
    "storm": Measurement(measure_storm),
}
