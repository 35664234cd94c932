"""Tables and numbers in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table whose first column is text and whose others are numbers."""
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


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
