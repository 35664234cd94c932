"""Parsers of command lines: what is wrong is one line, and every value is read as it is parsed."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Self

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports a process that SIGINT ended."""

_NEGATIVE = re.compile(r"-(\.?[0-9]|inf|nan)", re.IGNORECASE)


def interrupted_status(interrupt: KeyboardInterrupt) -> int:
    """The same for the signal that the exception carries; without one it is Ctrl-C. 143 for SIGTERM."""
    return 128 + int(interrupt.args[0]) if interrupt.args else INTERRUPTED


class Parser(argparse.ArgumentParser):
    """Raises ValueError, one line that names the flag."""

    _value_flags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, description: str, epilog: str | None = None) -> Self:
        """Parser of ``evicpress NAME``; the lines of ``epilog`` stay as they are."""
        form = argparse.RawDescriptionHelpFormatter
        prog = f"evicpress {name}"
        return cls(prog=prog, description=description, epilog=epilog, formatter_class=form, allow_abbrev=False)

    def add_json(self) -> None:
        """The flag that ``output.print_result`` reads."""
        self.add_argument("--json", action="store_true", help="print one JSON document and nothing else")

    def parse_values(self, argv: Sequence[str]) -> argparse.Namespace:
        """As ``parse_args``, but what looks like a number below 0 is the value of the flag before it, not a flag."""
        words: list[str] = []
        for word in argv:
            if words and words[-1] in self._value_flags and _NEGATIVE.match(word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return self.parse_args(words)

    def joined(self, argv: Sequence[str]) -> list[str]:
        """``argv`` with each value joined to its flag, as ``--flag=value``: for a parser that does not know these."""
        with_value = {flag for action in self._actions if action.nargs is None for flag in action.option_strings}
        words: list[str] = []
        for word in argv:
            if words and words[-1] in with_value:
                words[-1] += f"={word}"
            else:
                words.append(word)
        return words

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))

    def add_value(
        self,
        flag: str,
        read: Callable[[str], object],
        metavar: str,
        help: str,
        default: str | None = None,
        *,
        required: bool = False,
    ) -> None:
        """A flag whose value is what ``read`` makes of the text; its ValueError says what was expected."""

        def typed(text: str) -> object:
            try:
                return read(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        self._value_flags |= {flag}
        self.add_argument(flag, type=typed, metavar=metavar, help=help, default=default, required=required)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reader of a whole number."""
    expected = f"a whole number {f'of at least {least}' if most is None else f'from {least} to {most}'}"

    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= 18
        if not is_number or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"{text!r}: expected {expected}")
        return int(text)

    return read


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """A ValueError of what is done inside begins with the flag's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def say(message: str) -> None:
    """A line on stderr."""
    print(f"evicpress: {message}", file=sys.stderr, flush=True)
