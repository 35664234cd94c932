"""The quality of one context's forms against the tokens they keep, a curve for each press, as text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from sglang_evicpress.core import PRESSES
from sglang_evicpress.quality.profile import Profile

COLUMNS = 80
ROWS = 16
MARKS: dict[str, str] = {}
for _press in PRESSES:  # the first letter of its name that no press before it has
    MARKS[_press] = next((letter for letter in _press.upper() if letter not in {"_", *MARKS.values()}), "?")
"""Letters of the presses in a plot of text; where two presses meet, there is a star."""

_LEAST_SPAN = 0.05  # of qualities, so that noise does not look like much


def plot(profile: Profile) -> list[str]:
    """Lines of at most ``COLUMNS`` characters: quality upwards, the kept fraction to the right."""
    least = min(seen.mean for seen in profile.forms.values())
    floor = max(0.0, min(1.0 - _LEAST_SPAN, math.floor(least * 20.0) / 20.0))
    width = COLUMNS - 8
    grid = [[" "] * width for _ in range(ROWS)]
    grid[0][-1] = "="
    for form, seen in profile.forms.items():
        row, column = round((1.0 - seen.mean) / (1.0 - floor) * (ROWS - 1)), round(form.kept_fraction * (width - 1))
        mark = MARKS.get(form.press or "", "?")
        grid[row][column] = mark if grid[row][column] in (" ", mark) else "*"
    lines = ["quality"]
    for index, row_marks in enumerate(grid):
        label = f"{1.0 - index / (ROWS - 1) * (1.0 - floor):.3f}" if index % 5 == 0 else ""
        lines.append(f"{label:>6} |{''.join(row_marks)}".rstrip())
    axis = [" "] * width
    for tenth in range(0, 11, 2):
        text = f"{tenth / 10:g}"
        start = min(round(tenth / 10 * (width - 1)), width - len(text))
        axis[start : start + len(text)] = text
    presses = dict.fromkeys(form.press or "" for form in profile.forms)
    keys = [f"{MARKS.get(press, '?')} {press}" for press in presses]
    lines += [" " * 7 + "+" + "-" * (width - 1), " " * 8 + "".join(axis).rstrip(), " " * 8 + "kept fraction"]
    return [*lines, *_wrapped(keys), "* several presses  = exact"]


def _wrapped(words: list[str]) -> Iterator[str]:
    """Lines of at most ``COLUMNS`` characters of words with two blanks between."""
    line = ""
    for word in words:
        longer = f"{line}  {word}" if line else word
        if len(longer) > COLUMNS:
            yield line
            longer = word
        line = longer
    yield line


def about(profile: Profile) -> list[str]:
    """Two lines: which context, and how it was measured."""
    return [
        f"context {profile.key.hex()}, {profile.num_tokens} tokens",
        f"{profile.num_queries} queries scored by {profile.scorer}, {when(profile.measured_s)}",
    ]


def when(seconds: float) -> str:
    """Unix seconds as local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
