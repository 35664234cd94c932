"""`make bench-load`: settings under load on real servers, and a line for each promise of each.

It takes hours and goes on where it was stopped; `rm -r` a folder of bench/out/serve begins that one anew. `--publish`
runs nothing: it writes bench/results/load-DATE.md from settings that are finished, all of one commit.
"""

from __future__ import annotations

import argparse
import sys

from foundation.report import print_line
from load.grid import GRID, finished, measure
from load.published import publish


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=GRID, help="one setting")
    parser.add_argument("--publish", action="store_true", help="write the results; makes no runs")
    options = parser.parse_args()
    if options.publish:
        if options.only is not None:
            parser.error("--publish is of all settings: expected no --only")
        try:
            print(publish([finished(name) for name in GRID], "make bench-load"))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    lines = []
    for name in GRID if options.only is None else (options.only,):
        for line in measure(name):
            print_line(line)
            lines.append(line)
    return 0 if all(line.ok for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
