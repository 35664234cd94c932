"""`make chaos`: the real server on host memory and an SSD that fail on purpose, for 5 minutes under concurrent load.

Prints what was found and ends with status 1 if a line is MISSED.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foundation.report import print_line
from tiers.chaos import RATES, lines, storm


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of the storm (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--rates", default=RATES, help=f"of the faults (default: {RATES})")
    parser.add_argument(
        "--overload", type=float, default=0.0, metavar="TIMES", help="then offer so many times what was answered"
    )
    parser.add_argument("--keep-log", type=Path, help="where the server's log goes if something was wrong")
    options = parser.parse_args()
    outcome = storm(options.seconds, options.seed, options.page_size, options.rates, options.keep_log, options.overload)
    for problem in outcome.problems[:40]:
        print(f"  {problem}", flush=True)
    found = lines(outcome, options.seconds, options.rates)
    for line in found:
        print_line(line)
    return 0 if all(line.ok for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
