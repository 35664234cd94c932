"""`make show-foundation`: measures every promise of the foundation that a machine without a GPU can; one line each.

Ends with status 1 if a line is MISSED. Takes 20 to 30 minutes on 2 cores, 10 of them the storm. `--only WORD` runs the
parts whose name holds the word; `--storm-seconds N` shortens the storm, and the line then says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from foundation import exactness, frees, inputs, overhead, peer, readme, stock, storm
from foundation.report import Line, print_line
from testbed.server import Server

CONTEXTS_PER_CELL = 2  # 36 contexts a server, 144 in all, before those of the paths and partial matches
STORM_SECONDS = 600.0


def measure_exactness() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        yield from exactness.measure_all(Path(folder), CONTEXTS_PER_CELL)


def measure_stock() -> Iterator[Line]:
    yield stock.compare_import()
    lines, details = stock.compare()
    yield from lines
    print(*(f"    {detail}\n" for detail in details[:10]), sep="", end="", flush=True)


def measure_frees() -> Iterator[Line]:
    for page_size in frees.PAGE_SIZES:
        with Server(*frees.arguments(page_size)) as server:
            yield frees.measure(server, page_size)


def measure_storm(seconds: float) -> Iterator[Line]:
    seed = int(time.time())
    for page_size, share in ((1, 0.6), (16, 0.4)):
        outcome = storm.storm(seconds * share, page_size, seed)
        yield storm.line(outcome, page_size, seconds * share)
        print(*(f"    {problem}\n" for problem in outcome.problems[:5]), sep="", end="", flush=True)


def measure_overhead() -> Iterator[Line]:
    yield from overhead.overhead(pairs=80)
    yield overhead.attention_speedup(rounds=9)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--storm-seconds", type=float, default=STORM_SECONDS)
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "overhead": measure_overhead,
        "exactness": measure_exactness,
        "peer": peer.measure,
        "stock": measure_stock,
        "frees": measure_frees,
        "inputs": inputs.measure,
        "readme": readme.measure,
        "storm": lambda: measure_storm(options.storm_seconds),
    }
    begin = time.monotonic()
    lines = []
    for name, measure in parts.items():
        if options.only in name:
            for line in measure():
                print_line(line)
                lines.append(line)
    missed = sum(not line.ok for line in lines)
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(lines)} lines, {missed} missed, {minutes:.1f} minutes")
    return 1 if missed or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
