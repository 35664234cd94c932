"""Overhead of EvicPress where everything fits: two servers side by side, the same requests in turn."""

from __future__ import annotations

from collections.abc import Iterator

from foundation.overhead import overhead
from foundation.report import Line

MOST = 1.03
NUM_PAIRS = 240


def measure() -> Iterator[Line]:
    yield from overhead(NUM_PAIRS, most=MOST)
