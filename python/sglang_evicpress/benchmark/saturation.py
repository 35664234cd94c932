"""Requests per second that a benchmark's reference system answers at most: measured once, kept with the runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from sglang_evicpress.benchmark.client import TIMEOUT_S, Outcome
from sglang_evicpress.benchmark.config import Config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.benchmark.environment import commit
from sglang_evicpress.benchmark.interrupts import raising_interrupts
from sglang_evicpress.benchmark.results import read_object
from sglang_evicpress.benchmark.run_dir import RunDir
from sglang_evicpress.benchmark.runs import Bench, Launch, launch_command, plan_of
from sglang_evicpress.benchmark.systems import Sizes, System, profiling_system
from sglang_evicpress.files import write_whole
from sglang_evicpress.progress import Progress

SATURATION = "saturation.json"
ANEW = "another --out, or --fresh to measure anew"
SETTLE = 0.25
"""The first share of the time, which does not count: all clients begin at once."""


def at_saturation(
    config: Config,
    systems: Sequence[System],
    contexts: Sequence[Context],
    sizes: Sizes,
    out: Path,
    *,
    is_fresh: bool = False,
    timeout_s: float = TIMEOUT_S,
    launch: Launch = launch_command,
) -> Config:
    """``config`` with the rates of its load, if it has one: of the saturation in ``out``, or one measured now.

    A closed loop, as its queue stays as long as there are clients: an open one far above what can be sustained would
    measure how a server does with a queue of thousands. Raises ValueError when the reference is none of ``systems``,
    or ``out`` has the saturation of another benchmark, and ServerError and KeyboardInterrupt as ``run_all`` does.
    """
    load = config.load
    if load is None:
        return config
    reference = next((system for system in systems if system.name == load.reference), None)
    if reference is None:
        names = ", ".join(system.name for system in systems)
        raise ValueError(f"{config.path}: load: reference is {load.reference!r}: expected one of {names}")
    identity = plan_of(config, systems, contexts, sizes, "")["identity"]
    folder = RunDir(out.resolve())
    with raising_interrupts(), folder.locked():
        path = folder.path / SATURATION
        known = None if is_fresh else read_object(path, ANEW)
        if known is None:
            begin_unix_s, load_average = time.time(), os.getloadavg()
            bench = Bench(config, contexts, folder, timeout_s, launch)
            with Progress(0, "requests", is_shown=sys.stderr.isatty()) as progress:
                if reference.profiles is not None:
                    bench.profile(profiling_system(config, sizes, out), progress)
                outcomes = bench.saturate(reference, load.clients, load.seconds, progress)
            answered = within(outcomes, SETTLE * load.seconds, load.seconds)
            if not answered:
                raise ValueError(
                    f"{load.reference} answered none of {load.clients} clients in {load.seconds:g} s: expected a "
                    f"longer time in {config.path}: load: seconds"
                )
            known = {
                **{"identity": identity, "system": reference.name, "clients": load.clients, "seconds": load.seconds},
                **{"num_answers": answered, "rps": answered / ((1.0 - SETTLE) * load.seconds), "commit": commit()},
                **{"begin_unix_s": begin_unix_s, "load_average": load_average},
            }
            write_whole(str(path), orjson.dumps(known, option=orjson.OPT_INDENT_2) + b"\n")
        rps = known.get("rps")
        if not isinstance(rps, float) or known.get("identity") != orjson.loads(orjson.dumps(identity)):
            raise ValueError(f"{path} is that of another benchmark: expected {ANEW}")
    return config.saturated_at(rps)


def within(outcomes: Sequence[Outcome], begin_s: float, end_s: float) -> int:
    """Number of answers complete in that time."""
    return sum(each.error is None and not each.is_cut and begin_s < each.end_s <= end_s for each in outcomes)
