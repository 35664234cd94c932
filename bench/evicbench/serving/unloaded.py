"""Overhead of EvicPress where everything fits: two servers side by side, the same requests in turn."""

from __future__ import annotations

from collections.abc import Iterator

from evicbench.correctness.overhead import overhead
from evicbench.report import Line

MOST = 1.03
NUM_PAIRS = 240


def measure(num_pairs: int = NUM_PAIRS) -> Iterator[Line]:
    yield from overhead(num_pairs, most=MOST)
