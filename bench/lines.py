"""Loop of every `make show-...`: measure its parts in turn, print one line for each promise, and count the missed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping

from foundation.report import Line, print_line


def run_parts(doc: str | None, parts: Mapping[str, Callable[[], Iterable[Line]]]) -> int:
    """The exit status: 1 if a line is MISSED or nothing was measured, else 0.

    ``doc`` is the script's own. The command line may say `--only WORD`: the parts whose name holds the word.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help=f"one of {', '.join(parts)}, or a part of its name")
    options = parser.parse_args()
    begin = time.monotonic()
    lines = []
    for name, measure in parts.items():
        if options.only in name:
            start = time.monotonic()
            for line in measure():
                print_line(line)
                lines.append(line)
            print(f"    {name}: {time.monotonic() - start:.0f} s", flush=True)
    missed = sum(not line.ok for line in lines)
    print(f"{len(lines)} lines, {missed} missed, {(time.monotonic() - begin) / 60:.1f} minutes")
    return 1 if missed or not lines else 0
