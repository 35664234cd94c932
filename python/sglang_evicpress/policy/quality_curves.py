"""Quality curves: how good an answer stays when a press keeps only a part of a node's tokens.

EvicPress section 4.3 profiles every (method, ratio) of a context by answering questions on the compressed KV
and comparing with the answers on the whole; ``Curves`` holds such results and reads any form between and
below them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sglang_evicpress.core import PRESSES, Form

Curve = tuple[tuple[float, float], ...]
"""Points (kept_fraction, quality), kept_fraction strictly increasing, first (0, 0), last (1, 1)."""

DEFAULT = "default"

_SHAPE = 'expected an object such as {"keydiff": {"0.8": 0.99, "0.5": 0.9}, "default": {"0.5": 0.8}}'


@dataclass(frozen=True, slots=True)
class Curves:
    """One curve per press; ``default`` serves the presses that have none. Without it nothing is known of those.

    Build it with ``from_json`` or ``prior``, which fill in ``default``, or with ``measured``, which does not. They
    check the points.
    """

    by_press: Mapping[str, Curve]

    def quality(self, form: Form) -> float:
        """Quality of ``form`` in [0, 1]; 1 is as good as the exact KV.

        Linear between the points around ``form.kept_fraction``; below the lowest measured one, on the line
        from it down to 0 at nothing kept, so that what was never measured is not taken for good. A form of
        which nothing is known counts 0.
        """
        if form.is_exact:
            return 1.0
        curve = self._curve_of(form)
        return 0.0 if curve is None else _interpolate(curve, form.kept_fraction)

    def knows(self, form: Form) -> bool:
        """True if there is a curve for ``form``. The exact form needs none, a codec other than ``raw`` has none."""
        return form.is_exact or self._curve_of(form) is not None

    def _curve_of(self, form: Form) -> Curve | None:
        if form.codec != "raw" or form.press is None:
            return None
        return self.by_press.get(form.press, self.by_press.get(DEFAULT))

    @classmethod
    def from_json(cls, obj: object) -> Curves:
        """Read ``{PRESS: {KEPT: QUALITY, ...}, ...}``, as JSON gives it.

        PRESS is one of the presses or ``default``, KEPT a number in (0, 1] written as a string, QUALITY a
        number in [0, 1]. Keeping everything is quality 1 whether the point is given or not. Quality need not
        rise with what is kept: measurements are noisy and are taken as they are. Without ``default``, a press
        that is not given gets the lowest of the given curves at every fraction.

        Raises ValueError naming the key or value and what is accepted.
        """
        if not isinstance(obj, Mapping) or not obj:
            raise ValueError(f"quality curves are {obj!r}: {_SHAPE}")
        by_press: dict[str, Curve] = {}
        for press, points in obj.items():
            if press not in PRESSES and press != DEFAULT:
                raise ValueError(
                    f"quality curve of press {press!r}: expected one of {', '.join(PRESSES)} or {DEFAULT!r}"
                )
            by_press[press] = _curve(press, points, _number_in_text, " as a string, such as '0.5'")
        by_press.setdefault(DEFAULT, _lowest(by_press.values()))
        return cls(by_press)

    @classmethod
    def measured(cls, points: Mapping[str, Mapping[float, float]]) -> Curves:
        """Curves of only the presses that ``points`` has: quality by kept fraction. Without any, only the exact form
        is known. Raises ValueError as ``from_json`` does.
        """
        for press in points:
            if press not in PRESSES:
                raise ValueError(f"quality curve of press {press!r}: expected one of {', '.join(PRESSES)}")
        return cls({press: _curve(press, curve, _number, "") for press, curve in points.items()})

    @classmethod
    def prior(cls) -> Curves:
        """A guess to start with, the same for every context; it is not measured.

        quality = 1 - (1 - kept)**3 on a grid of hundredths (0.99 at 0.8, 0.875 at 0.5, 0.49 at 0.2) for every
        press; for the control ``random``, which looks at nothing, quality = kept.
        """
        guess = tuple((index / 100, 1 - (1 - index / 100) ** 3) for index in range(101))
        return cls({DEFAULT: guess, "random": ((0.0, 0.0), (1.0, 1.0))})


def _number_in_text(key: object) -> float:
    try:
        return float(key) if isinstance(key, str) else math.nan
    except ValueError:
        return math.nan


def _number(key: object) -> float:
    return float(key) if isinstance(key, int | float) and not isinstance(key, bool) and 0 < key <= 1 else math.nan


def _curve(press: str, points: object, number_of: Callable[[object], float], how: str) -> Curve:
    """``number_of`` reads a kept fraction, nan when it is none; ``how`` says how one is written."""
    if not isinstance(points, Mapping) or not points:
        raise ValueError(f"quality curve of press {press!r} is {points!r}: {_SHAPE}")
    curve = {0.0: 0.0, 1.0: 1.0}
    seen: set[float] = set()
    for key, value in points.items():
        where = f"quality curve of press {press!r} at kept fraction {key!r}"
        kept = number_of(key)
        if not 0.0 < kept <= 1.0:
            raise ValueError(f"{where}: expected a number in (0, 1]{how}")
        if kept in seen:
            raise ValueError(f"{where}: expected each kept fraction once")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
            raise ValueError(f"{where} is {value!r}: expected a number in [0, 1]")
        if kept == 1.0 and value != 1.0:
            raise ValueError(f"{where} is {value!r}: expected 1, everything is kept")
        seen.add(kept)
        curve[kept] = float(value)
    return tuple(sorted(curve.items()))


def _lowest(curves: Iterable[Curve]) -> Curve:
    """A curve nowhere above any of ``curves``: their minimum at every point of any of them."""
    known = list(curves)
    kept_fractions = sorted({kept for curve in known for kept, _ in curve})
    return tuple((kept, min(_interpolate(curve, kept) for curve in known)) for kept in kept_fractions)


def _interpolate(curve: Curve, kept: float) -> float:
    right = bisect_left(curve, (kept,))
    above_kept, above = curve[right]
    if above_kept == kept:
        return above
    below_kept, below = curve[right - 1]
    share = (kept - below_kept) / (above_kept - below_kept)
    return min(max(below + share * (above - below), 0.0), 1.0)
