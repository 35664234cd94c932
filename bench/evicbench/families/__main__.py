"""Every family of the table on a real server, one after the other; a line for each, then the refused ones.

`--only NAME` runs one. About 40 s each on two cores.
"""

from __future__ import annotations

import argparse
import logging
import sys

from evicbench.families.refusals import is_refused, last_line
from evicbench.families.run import measure
from evicbench.families.table import FAMILIES, REFUSED

PAGE_SIZES = (1, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [each.name for each in (*FAMILIES, *REFUSED)]
    parser.add_argument("--only", action="append", choices=names, help="one of them; may be given several times")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    is_right = True
    for index, family in enumerate(FAMILIES):
        if not options.only or family.name in options.only:
            outcome = measure(family, PAGE_SIZES[index % len(PAGE_SIZES)])
            is_right &= outcome.is_exact
            print(outcome, flush=True)
    for refused in REFUSED:
        if not options.only or refused.name in options.only:
            status, line = last_line(refused)
            is_as_said = is_refused(refused, status, line)
            is_right &= is_as_said
            verdict = "refused" if is_as_said else f"NOT REFUSED, status {status}"
            print(f"{refused.name} | {verdict} | {line}", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
