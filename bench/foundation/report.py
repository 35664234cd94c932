"""The lines of `make show-foundation`: what was promised, the target, the figure measured, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One promise: ``what`` it is, its ``target`` and the ``figure`` measured, both in words with their unit."""

    what: str
    target: str
    figure: str
    ok: bool


def print_line(line: Line) -> None:
    """One line on standard output, at once: a reader of a pipe sees it when it is measured."""
    print(
        f"{'ok    ' if line.ok else 'MISSED'} {line.what} | target: {line.target} | measured: {line.figure}", flush=True
    )
