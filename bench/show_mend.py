"""`make show-mend`: measures that what an outside reading and outside runs found is mended; one line each.

Ends with status 1 if a line is MISSED. Takes about 20 minutes on 2 cores, 10 of them hostile clients. `--only WORD`
runs the parts whose name holds the word.
"""

from __future__ import annotations

import sys

from lines import run_parts
from mend import folders, hostile, scale, suites, surface

PARTS = {
    "scale": scale.measure,
    "surface": surface.measure,
    "folders": folders.measure,
    "hostile": hostile.measure,
    "suites": suites.measure,
}

if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
