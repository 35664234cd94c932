"""Measurements of `make show-codecs`; servers' runs that are there already are not made again."""

from __future__ import annotations

from functools import partial

from evicbench.codecs import distortion, figures, path, serving, simulation, uneven
from evicbench.report import Measurement, unjudged

MEASUREMENTS = {
    "sizes": Measurement(figures.sizes, figures.sizes),
    "exactness": Measurement(figures.exactness, figures.exactness),
    "path": Measurement(path.measure, path.quick),
    "uneven": Measurement(uneven.measure),
    "speeds": Measurement(figures.speeds, unjudged(partial(figures.speeds, 1024, 3))),
    "distortion": Measurement(distortion.measure, unjudged(partial(distortion.measure, 3, 2))),
    "serving": Measurement(serving.measure),
}
for trace in ("mooncake", "miniswe", "weka"):
    MEASUREMENTS[f"simulation-{trace}"] = Measurement(
        partial(simulation.beside_fixed, trace),
        unjudged(partial(simulation.beside_fixed, trace, 300)) if trace == "miniswe" else None,
    )
