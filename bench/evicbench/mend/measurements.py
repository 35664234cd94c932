"""Measurements of `make show-mend`."""

from __future__ import annotations

from evicbench.mend import folders, hostile, scale, suites, surface
from evicbench.report import Measurement

MEASUREMENTS = {
    "scale": Measurement(scale.measure),
    "surface": Measurement(surface.measure),
    "folders": Measurement(folders.measure),
    "hostile": Measurement(hostile.measure),
    "suites": Measurement(suites.measure),
}
