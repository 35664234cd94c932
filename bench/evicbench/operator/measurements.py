"""Measurements of `make show-operator`.

``prometheus`` needs the Debian package of that name, ``page`` the package ``chromium``.
"""

from __future__ import annotations

from functools import partial

from evicbench.operator import cost, page, prometheus, scale, series
from evicbench.report import Measurement, unjudged

MEASUREMENTS = {
    "series": Measurement(series.measure, unjudged(partial(series.measure, 6))),
    "prometheus": Measurement(prometheus.measure),
    "page": Measurement(page.measure),
    "cost": Measurement(cost.measure),
    "scale": Measurement(scale.measure, partial(scale.measure, (1_000,))),
}
