"""Measurements of `make show-bench`; runs that are there already are not made again."""

from __future__ import annotations

from functools import partial

from evicbench.report import Measurement, unjudged
from evicbench.serving import targets, unloaded

MEASUREMENTS = {
    "systems": Measurement(targets.measure),
    "overhead": Measurement(unloaded.measure, unjudged(partial(unloaded.measure, 8))),
}
