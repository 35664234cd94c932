"""When requests come, in seconds from the start of a rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path


def poisson(count: int, per_s: float, draw: random.Random) -> list[float]:
    return list(accumulate(draw.expovariate(per_s) for _ in range(count)))


def spread(count: int, seconds: float, shape: float, draw: random.Random) -> list[float]:
    """``count`` arrivals within exactly so many seconds, their gaps drawn from a gamma distribution of that shape.

    Of shape 1 they are a Poisson process of which the count is known; of a smaller one they come in bursts: the
    variance of a gap is its squared mean over the shape. The last gap is behind the last arrival.
    """
    gaps = [draw.gammavariate(shape, 1.0) for _ in range(count + 1)]
    scale = seconds / sum(gaps)
    return list(accumulate(gap * scale for gap in gaps[:-1]))


def stretched(trace_s: Sequence[float], count: int, per_s: float, window: int) -> list[float]:
    """``count`` arrivals of a trace one after the other, ``per_s`` a second on average: with every window further on.

    Behind the end of the trace comes its beginning. Raises ValueError when that stretch of the trace takes no time.
    """
    num_gaps = len(trace_s) - 1
    gaps = [trace_s[1 + i % num_gaps] - trace_s[i % num_gaps] for i in range(window * count, (window + 1) * count)]
    took_s = sum(gaps)
    if took_s <= 0.0:
        raise ValueError(f"arrivals {window * count} to {(window + 1) * count} of the trace all come at one time")
    return list(accumulate(gap_s * (count / per_s) / took_s for gap_s in gaps))


def read_trace(path: Path) -> list[float]:
    """The times in the first column of a CSV file, in order: seconds, or dates. A first line of names is left out.

    Raises ValueError for fewer than two times, or a line that begins with something else.
    """
    times: list[float] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): expected a CSV file") from None
    for number, line in enumerate(lines, start=1):
        cell = line.partition(",")[0].strip().strip('"')
        if not line.strip():
            continue
        try:
            times.append(_seconds(cell))
        except ValueError:
            if number > 1:
                raise ValueError(f"{path} line {number} begins with {cell!r:.60}: expected a time") from None
    if len(times) < 2:
        raise ValueError(f"{path} has {len(times)} times in its first column: expected at least two")
    return sorted(times)


def _seconds(cell: str) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        return datetime.fromisoformat(cell[:26]).timestamp()  # a date of more than microseconds is not read
    if not math.isfinite(seconds):
        raise ValueError
    return seconds
