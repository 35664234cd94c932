"""Costs that must not grow: pages of a large tree, and the digest of all weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from evicbench.report import Line
from sglang_evicpress.core import EXACT
from sglang_evicpress.introspect.census import Census, Counted
from sglang_evicpress.tiers.entry.weights_digest import weights_digest

LEAST_GB_PER_S = 0.3  # of one core: 16 GB within a minute
WEIGHT_BYTES = 1 << 28
NUM_NODES = 100_000


def measure() -> Iterator[Line]:
    yield _digest_line()
    yield _census_line()


def _digest_line() -> Line:
    torch.set_num_threads(1)
    weights = [("w", torch.randn(1 << 14, WEIGHT_BYTES >> 15).to(torch.bfloat16))]
    weights_digest(weights)
    begin = time.perf_counter()
    weights_digest(weights)
    rate = weights[0][1].nbytes / (time.perf_counter() - begin) / 1e9
    return Line(
        "digest of every byte of the weights, one CPU core",
        f">= {LEAST_GB_PER_S:g} GB/s",
        f"{rate:.2f} GB/s",
        rate >= LEAST_GB_PER_S,
    )


def _census_line() -> Line:
    census = Census()
    for node_id in range(NUM_NODES):
        census.put(node_id, Counted(EXACT, 64, 64, False))
    begin = time.thread_time()
    for _ in range(100):
        census.by_form()
    microseconds = (time.thread_time() - begin) / 100 * 1e6
    return Line(
        f"totals of {NUM_NODES:,} nodes for /evicpress/stats",
        "<= 100 us",
        f"{microseconds:.1f} us",
        microseconds <= 100.0,
    )
