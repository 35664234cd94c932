"""Costs that must not grow: pages of a large tree, and the digest of all weights."""

from __future__ import annotations

import random
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
    yield _differences_line()
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


def _differences_line() -> Line:
    """Changes that an identity must show, each at random places of tensors of powers of two."""
    rng, num_tried, num_same = random.Random("digest"), 0, 0
    for _ in range(60):
        weight = torch.randn(64, 64).to(rng.choice((torch.bfloat16, torch.float16, torch.float32)))
        if rng.random() < 0.3:
            weight = weight.t()
        first, second = rng.sample(range(64), 2)
        changes = []
        byte = weight.clone(memory_format=torch.contiguous_format)
        byte.view(torch.uint8)[first, second] ^= 1 << rng.randrange(8)
        changes.append((weight.contiguous(), byte))
        swapped = weight.contiguous().clone()
        swapped[[first, second]] = swapped[[second, first]]
        changes.append((weight.contiguous(), swapped))
        columns = torch.randn(64, 64).to(weight.dtype)
        columns[:, [0, 63]] = weight[:, [0, 63]]
        changes.append((weight.contiguous(), columns))
        changes.append((weight.contiguous(), weight.t().contiguous()))
        for before, after in changes:
            num_tried += 1
            num_same += weights_digest([("w", before)]) == weights_digest([("w", after)])
    return Line(
        "weights with one bit, two rows, most columns changed, or transposed",
        "every digest differs",
        f"{num_tried - num_same} of {num_tried} differ",
        num_same == 0,
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
