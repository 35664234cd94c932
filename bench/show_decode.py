"""`make show-decode`: measures every promise of decode-time budgets that a machine without a GPU can; one line each.

Ends with status 1 if a line is MISSED. Takes at most 20 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. The table of accuracy against budget goes to bench/out/decode.
"""

from __future__ import annotations

import sys

from decode import accuracy, cost, guide, identical, neighbours, room, walls
from lines import run_parts

PARTS = {
    "guide": guide.measure,
    "walls": walls.measure,
    "cost": cost.measure,
    "room": room.measure,
    "neighbours": neighbours.measure,
    "identical": identical.measure,
    "accuracy": accuracy.measure,
}

if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
