"""Measurements of `make show-mend`."""

from __future__ import annotations

from functools import partial

from evicbench.mend import folders, hostile, scale, suites, surface
from evicbench.report import Measurement

MEASUREMENTS = {
    "scale": Measurement(scale.measure, scale.measure),
    "surface": Measurement(surface.measure),
    "folders": Measurement(folders.measure),
    "hostile": Measurement(hostile.measure, partial(hostile.measure, 15.0, (None,))),
    "suites": Measurement(suites.measure),
}
