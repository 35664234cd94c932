"""Speed of the tiers' copies, writes, reads and starts, and their memory: one line per promise.

`--json FILE` also writes the lines as JSON, `--only WORD` runs the parts whose name holds the word. Ends with status 1
if a line is MISSED.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from foundation.report import Line, print_line
from tiers.bandwidth import measure_bandwidth
from tiers.fragmentation import measure_fragmentation
from tiers.host import measure_host
from tiers.index import measure_index


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "bandwidth": measure_bandwidth,
        "host": measure_host,
        "fragmentation": measure_fragmentation,
        "index": measure_index,
    }
    begin = time.monotonic()
    lines = []
    for name, measure in parts.items():
        if options.only in name:
            for line in measure():
                print_line(line)
                lines.append(line)
    missed = sum(not line.ok for line in lines)
    print(f"{len(lines)} lines, {missed} missed, {time.monotonic() - begin:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    return 1 if missed or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
