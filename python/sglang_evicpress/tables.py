"""Tables as plain text and as Markdown, and the figures in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in rows]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int = 1) -> Iterator[str]:
    """Lines of a table whose first ``num_text`` columns are text and whose others are numbers."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * num_text + "---:|" * (len(head) - num_text)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def ms(seconds: float | None) -> str:
    """Milliseconds to three digits; a dash for what is not known."""
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
