"""`make bench-load`: settings under load on real servers, and a line for each promise of each.

It takes hours and goes on where it was stopped; `rm -r` a folder of bench/out/serve begins that one anew.
`--repetitions N` makes the first N of every setting, and another time the others. `--publish` runs nothing: it writes
bench/results/load-DATE.md from the settings that are there, all of one commit, and from the repetitions that were
published before by the same code, which bench/results/load-repetitions.json has; what is not there is a line that is
MISSED.
"""

from __future__ import annotations

import argparse
import sys

from evicbench.load.grid import GRID, finished, measure
from evicbench.load.published import publish
from evicbench.report import print_line
from evicbench.serving.runs import folder_of


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=GRID, help="one setting")
    parser.add_argument("--repetitions", type=int, metavar="N", help="of each setting, now")
    parser.add_argument("--publish", action="store_true", help="write the results; makes no runs")
    options = parser.parse_args()
    if options.publish:
        if options.only is not None:
            parser.error("--publish is of all settings: expected no --only")
        there = [name for name in GRID if folder_of(name).is_dir()]
        absent = [name for name in GRID if name not in there]
        if not there:
            parser.error(f"--publish: {folder_of('')} has no setting: expected runs of one at least")
        try:
            print(publish([finished(name) for name in there], "make bench-load", absent))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    lines = []
    for name in GRID if options.only is None else (options.only,):
        for line in measure(name, options.repetitions):
            print_line(line)
            lines.append(line)
    return 0 if all(line.ok for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
