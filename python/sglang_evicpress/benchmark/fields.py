"""Reads the values of a config file, one key after the other."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Fields:
    """The keys of one mapping. ``where`` begins every error: the file, and the key that the mapping is the value of."""

    where: str
    values: Mapping[str, object]
    _read: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, where: str, value: object) -> Fields:
        """Raises ValueError when ``value`` is no mapping of names."""
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{where} is {value!r:.100}: expected a mapping of names to values")
        return cls(where, value)

    def need(self, key: str, reader: Callable[[object], T], expected: str) -> T:
        """The value as ``reader`` gives it. Raises ValueError where there is none, or ``reader`` raises it."""
        self._read.append(key)
        value = self.values.get(key)
        if value is None:
            raise ValueError(f"{self.where} has no {key}: expected {expected}")
        try:
            return reader(value)
        except ValueError:
            raise ValueError(f"{self.where}: {key} is {value!r:.100}: expected {expected}") from None

    def get(self, key: str, reader: Callable[[object], T], expected: str, default: T) -> T:
        """Like ``need``, but ``default`` where there is no value, or null."""
        if self.values.get(key) is None:
            self._read.append(key)
            return default
        return self.need(key, reader, expected)

    def finish(self) -> None:
        """Raises ValueError when there are keys that nobody read."""
        if unknown := [key for key in self.values if key not in self._read]:
            raise ValueError(f"{self.where} has the unknown key {unknown[0]!r:.100}: expected {', '.join(self._read)}")


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return value


def words(value: object) -> tuple[str, ...]:
    """A list of texts and numbers, or one text that is split as a shell does."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    if not isinstance(value, Sequence):
        raise ValueError
    return tuple(_word(each) for each in value)


def texts_by_name(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError
    return {text(name): _word(each) for name, each in value.items()}


def _word(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def number(at_least: float = 0.0, *, above: float = -math.inf, below: float = math.inf) -> Callable[[object], float]:
    """A reader of finite numbers. ``2e8``, which is a text to YAML, is one too."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        try:
            found = float(value)
        except OverflowError:
            raise ValueError from None
        if not (math.isfinite(found) and at_least <= found and above < found < below):
            raise ValueError
        return found

    return read


def whole(at_least: int, at_most: int = 10**12) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise ValueError
        return value

    return read


def one_of(names: Sequence[str]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return read


def each(reader: Callable[[object], T], *, may_be_empty: bool = False) -> Callable[[object], tuple[T, ...]]:
    """A reader of lists, in which nothing comes twice."""

    def read(value: object) -> tuple[T, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError
        found = tuple(reader(part) for part in value)
        if len(set(found)) < len(found) or not (found or may_be_empty):
            raise ValueError
        return found

    return read
