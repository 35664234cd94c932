"""Lines of `bench/show.py`: a promise, its target and the figure measured; and the measurements that yield them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

_WORDS = {True: "ok", False: "MISSED", None: "quick"}


@dataclass(frozen=True, slots=True)
class Line:
    """One promise: ``what`` it is, its ``target`` and the ``figure`` measured, both in words with their unit.

    ``ok`` is None where the figure was measured at a size that the target is not about.
    """

    what: str
    target: str
    figure: str
    ok: bool | None


Measure = Callable[[], Iterable[Line]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Part of an area. ``quick`` is the same code at a smaller size, None where no size is small enough."""

    full: Measure
    quick: Measure | None = None


def unjudged(measure: Measure) -> Measure:
    """The same lines, none of them judged."""

    def lines() -> Iterator[Line]:
        return (replace(line, ok=None) for line in measure())

    return lines


def print_line(line: Line) -> None:
    """One line on standard output, at once: a reader of a pipe sees it when it is measured."""
    print(f"{_WORDS[line.ok]:6} {line.what} | target: {line.target} | measured: {line.figure}", flush=True)


def run_measurements(measurements: Mapping[str, Measure]) -> int:
    """The exit status: 1 if a line is MISSED or nothing was measured, else 0. A measurement that raises is MISSED, and
    the next one follows."""
    begin = time.monotonic()
    lines = []
    for name, measure in measurements.items():
        start = time.monotonic()
        try:
            for line in measure():
                print_line(line)
                lines.append(line)
        except (RuntimeError, OSError) as error:  # a server that does not start, a disk that is full
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            lines.append(Line(name, "measured to its end", said, False))
            print_line(lines[-1])
        print(f"    {name}: {time.monotonic() - start:.0f} s", flush=True)
    missed = sum(line.ok is False for line in lines)
    print(f"{len(lines)} lines, {missed} missed, {(time.monotonic() - begin) / 60:.1f} minutes")
    return 1 if missed or not lines else 0
