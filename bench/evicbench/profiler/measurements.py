"""Measurements of `make show-profiler`; the first three look at the same contexts, measured once."""

from __future__ import annotations

from functools import partial

from evicbench.profiler.agreement import measure_agreement
from evicbench.profiler.cost import measure_cost
from evicbench.profiler.durability import measure_durability
from evicbench.profiler.figure10 import measure_figure10
from evicbench.profiler.heldout import measure_heldout
from evicbench.profiler.insights import measure_insights
from evicbench.profiler.interference import measure_interference
from evicbench.profiler.study import FORMS
from evicbench.report import Measurement, unjudged

MEASUREMENTS = {
    "insights": Measurement(measure_insights),
    "heldout": Measurement(measure_heldout),
    "agreement": Measurement(measure_agreement),
    "cost": Measurement(measure_cost, unjudged(partial(measure_cost, ("needle",), FORMS[::3]))),
    "durability": Measurement(measure_durability),
    "figure10": Measurement(measure_figure10),
    "interference": Measurement(measure_interference),
}
