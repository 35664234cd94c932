"""Measurements of `make show-bench`; runs that are there already are not made again."""

from __future__ import annotations

from functools import partial

from evicbench.correctness.overhead import overhead
from evicbench.report import Measurement, unjudged
from evicbench.serving import targets

MOST_OVERHEAD = 1.03
"""Of TTFT where everything fits: two servers side by side, the same requests in turn."""

MEASUREMENTS = {
    "systems": Measurement(targets.measure),
    "overhead": Measurement(
        partial(overhead, 240, most=MOST_OVERHEAD), unjudged(partial(overhead, 8, most=MOST_OVERHEAD))
    ),
}
