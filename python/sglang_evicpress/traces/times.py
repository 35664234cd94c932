"""Timestamps of a trace as seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from sglang_evicpress.traces.base import member

UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Name of a unit of time -> how many make a second."""

DATE = 0
"""Unit of a date in place of a number per second: dates and numbers do not mix in one trace."""

_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{0,30})?([eE][-+]?[0-9]{1,3})?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_CHARS = 64


class Clock:
    """Reads one key of every line of a trace: numbers of ``unit`` of at least 0, also in strings, and, with
    ``has_dates``, dates and times in ISO 8601, in UTC where no offset is given.

    With ``has_dates`` seconds count from the first line, else from 0. Subtracted as they stand: nanoseconds since 1970
    do not fit a float.
    """

    def __init__(self, unit: str, *, has_dates: bool) -> None:
        self.unit = unit
        self._has_dates = has_dates
        self._origin: tuple[float | int, int] | None = None

    def seconds(self, record: Mapping[str, object], key: str) -> float:
        """ValueError for a value that is neither, or for a date among numbers."""
        value = member(record, key)
        amount, per_s = self._parsed(value, key)
        if not self._has_dates:
            return amount / per_s
        if self._origin is None:
            self._origin = amount, per_s
        origin, before = self._origin
        if (per_s == DATE) != (before == DATE):
            kind = "a date" if before == DATE else "a number"
            raise ValueError(f"{key!r} is {value!r:.60}: expected {kind}, as in the lines before")
        return (amount - origin) / (per_s or UNITS["us"])

    def _parsed(self, value: object, key: str) -> tuple[float | int, int]:
        """The number with how many make a second, or the microseconds since 1970 of a date."""
        number = value
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            number = int(value) if value.strip().isdigit() else float(value)
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) and number >= 0:
            return number, UNITS[self.unit]
        if self._has_dates and isinstance(value, str) and len(value) <= _MOST_CHARS:
            try:
                moment = datetime.fromisoformat(value.strip())
            except ValueError:
                pass  # said below
            else:
                moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
                return (moment - _EPOCH) // timedelta(microseconds=1), DATE
        dates = ", or a date such as 2025-11-25T07:14:00Z" if self._has_dates else ""
        raise ValueError(f"{key!r} is {value!r:.60}: expected a finite number of at least 0{dates}")
