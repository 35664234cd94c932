"""Sizes, bandwidths and seconds as people write them, and back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}"
_SIZE = re.compile(rf"({_NUMBER})\s*([a-z%]*)", re.IGNORECASE)
_RATE = re.compile(rf"({_NUMBER})\s*([a-z]+)/s", re.IGNORECASE)

TOKEN_UNITS = {"": 1, "tok": 1, "ktok": 10**3, "mtok": 10**6, "gtok": 10**9}
BYTE_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    BYTE_UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}

SIZE_HELP = (
    "a share of the working set such as 1%, bytes such as 30GB or 30GiB, "
    "or tokens of exact KV such as 500000 or 500ktok"
)
RATE_HELP = "bytes a second above 0 such as 20GB/s or 800MiB/s"


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of cache: a share of the working set ("%"), tokens ("tok") or bytes ("b"). Exact."""

    amount: Fraction
    unit: str

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read ``1%``, ``30GB``, ``30GiB``, ``500000`` or ``500ktok``; letters in either case, 0 or more.

        ValueError says what is accepted.
        """
        match = _SIZE.fullmatch(text.strip())
        if match:
            amount, unit = Fraction(match[1]), match[2].lower()
            if unit == "%":
                return cls(amount / 100, "%")
            if unit in TOKEN_UNITS:
                return cls(amount * TOKEN_UNITS[unit], "tok")
            if unit in BYTE_UNITS:
                return cls(amount * BYTE_UNITS[unit], "b")
        raise ValueError(f"{text!r}: expected {SIZE_HELP}")

    def num_bytes(self, working_set_tokens: int, slot_bytes: int) -> int:
        """Whole bytes, rounded down. ``slot_bytes`` is what the exact KV of one token takes."""
        tokens = self.amount * working_set_tokens if self.unit == "%" else self.amount
        return int(self.amount if self.unit == "b" else tokens * slot_bytes)


def parse_rate(text: str) -> float:
    """Bytes per second of ``20GB/s``. ValueError says what is accepted."""
    match = _RATE.fullmatch(text.strip())
    unit = BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not (rate := float(Fraction(match[1]) * unit)):
        raise ValueError(f"{text!r}: expected {RATE_HELP}")
    return rate


def parse_number(text: str, expected: str, is_above: bool = False) -> float:
    """A finite number, 0 or more (``is_above``: above 0). ValueError says what is ``expected``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0.0 or (is_above and value == 0.0):
        raise ValueError(f"{text!r}: expected {expected}")
    return value


def plain(text: str) -> str:
    """``text`` as any terminal and JSON take it: what cannot be printed, such as a byte of a path that is no UTF-8, is
    escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit, such as ``1.25 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * size:
            return f"{three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent from 0.001 up: 0.0123, 1.23, 12.3, 123, 1,234."""
    if value == 0.0:
        return "0"
    if not math.isfinite(value):
        return f"{value}"
    if abs(value) < 0.001:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))) + 1e-9))
    return f"{value:,.{digits}f}"
