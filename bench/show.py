"""`make show-AREA`: measures the promises of one area on this machine; one line each.

Ends with status 1 if a line is MISSED. `--quick` takes at most 2 minutes: smaller sizes, fewer repetitions, and a line
whose target is about a larger size says `quick` and is not judged. bench/README.md explains the areas.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from evicbench.report import Measurement, run_measurements

AREAS = {
    "foundation": "correctness",
    "policy": "policy",
    "tiers": "tiers",
    "profiler": "profiler",
    "bench": "serving",
    "decode": "decode_budget",
    "kernels": "kernels_cpu",
    "mend": "mend",
    "load": "load",
    "house": "house",
    "budgets": "budgets",
    "codecs": "codecs",
    "releases": "releases",
    "operator": "operator",
    "trust": "trust",
}
"""Area -> its room of evicbench, whose module ``measurements`` lists what is measured."""


def measurements_of(area: str) -> Mapping[str, Measurement]:
    measurements: Mapping[str, Measurement] = import_module(f"evicbench.{AREAS[area]}.measurements").MEASUREMENTS
    return measurements


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--only", default="", metavar="WORD", help="measurements whose name holds the word")
    parser.add_argument("--quick", action="store_true", help="small sizes, at most 2 minutes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for tables and plots (default: bench/out)")
    parser.add_argument("--list", action="store_true", help="print the names of the area's measurements, * if quick")
    options = parser.parse_args(arguments)
    if options.out is not None:
        os.environ["EVICPRESS_OUT"] = str(options.out)  # before the room, and evicbench.paths with it, is imported
    known = measurements_of(options.area)
    if options.list:
        print(*(f"{name} *" if measurement.quick else name for name, measurement in known.items()), sep="\n")
        return 0
    chosen = {name: measurement for name, measurement in known.items() if options.only in name}
    if not chosen:
        parser.error(f"no measurement of {options.area} has {options.only!r} in its name: expected {', '.join(known)}")
    if options.quick:
        return run_measurements({name: each.quick for name, each in chosen.items() if each.quick is not None})
    return run_measurements({name: each.full for name, each in chosen.items()})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are stopped
    sys.exit(main())
