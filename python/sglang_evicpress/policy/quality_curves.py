"""Quality curves: how good an answer stays when a press keeps only a part of a node's tokens.

EvicPress section 4.3 profiles every (method, ratio) of a context by answering questions on the compressed KV
and comparing with the answers on the whole; ``Curves`` holds such results and reads any form between and
below them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sglang_evicpress.core import PRESSES, Form

Curve = tuple[tuple[float, float], ...]
"""Points (kept_fraction, quality), kept_fraction strictly increasing, first (0, 0), last (1, 1)."""

DEFAULT = "default"

_SHAPE = 'expected an object such as {"keydiff": {"0.8": 0.99, "0.5": 0.9}, "default": {"0.5": 0.8}}'


@dataclass(frozen=True, slots=True)
class Curves:
    """One curve per press, and per press with a layer budget, as ``snapkv:pyramid``; ``default`` serves those
    that have none. Without it nothing is known of those.
    ``stored`` has the forms with a codec that were measured.

    Build it with ``from_json`` or ``prior``, which fill in ``default``, or with ``measured``, which does not. They
    check the points.
    """

    by_press: Mapping[str, Curve]
    stored: Mapping[Form, float] = field(default_factory=dict)

    def quality(self, form: Form) -> float:
        """Quality of ``form`` in [0, 1]; 1 is as good as the exact KV.

        Linear between the points around ``form.kept_fraction``; below the lowest measured one, on the line
        from it down to 0 at nothing kept, so that what was never measured is not taken for good. A press and a
        codec of which only each was measured lose what both lose; and of fewer tokens than both together were
        measured with, no more is believed than of those. A form of which nothing is known counts 0.
        """
        if form.is_exact:
            return 1.0
        if form.has_lossy_codec:
            if form in self.stored:
                return self.stored[form]
            curve = self._stored_curve_of(form)
            together = None if curve is None else _interpolate(curve, form.kept_fraction)
            if not self._knows_parts(form):
                return 0.0 if together is None else together
            apart = max(0.0, self.quality(form.pressed) + self.stored[Form(codec=form.codec)] - 1.0)
            return apart if together is None else min(apart, together)
        curve = self._curve_of(form)
        return 0.0 if curve is None else _interpolate(curve, form.kept_fraction)

    def knows(self, form: Form) -> bool:
        """True if its quality was measured, or follows from what was. That of the exact form is 1."""
        if form.has_lossy_codec:
            return form in self.stored or self._knows_parts(form) or self._stored_curve_of(form) is not None
        return form.is_exact or self._curve_of(form) is not None

    def _knows_parts(self, form: Form) -> bool:
        """True if of a form with a codec each, press and codec, is known."""
        return Form(codec=form.codec) in self.stored and self.knows(form.pressed)

    def _stored_curve_of(self, form: Form) -> Curve | None:
        """Points up to the most tokens with which its press and codec were measured together, None if it keeps more."""
        points = {
            other.kept_fraction: quality
            for other, quality in self.stored.items()
            if other.press is not None and (other.method, other.codec) == (form.method, form.codec)
        }
        return ((0.0, 0.0), *sorted(points.items())) if max(points, default=0.0) >= form.kept_fraction else None

    def _curve_of(self, form: Form) -> Curve | None:
        if form.method is None:
            return None
        return self.by_press.get(form.method, self.by_press.get(DEFAULT))

    @classmethod
    def from_json(cls, obj: object) -> Curves:
        """Read ``{PRESS: {KEPT: QUALITY, ...}, FORM: QUALITY, ...}``, as JSON gives it.

        PRESS is one of the presses, perhaps with a layer budget, as ``snapkv:pyramid``, or ``default``, KEPT a
        number in (0, 1] written as a string, FORM one with a codec, such as ``exact+int4`` or ``keydiff@0.5+int4``,
        QUALITY a number in [0, 1]. Keeping everything is quality 1 whether the point is given or not. Quality need not
        rise with what is kept: measurements are noisy and are taken as they are. Without ``default``, a press that is
        not given gets the lowest of the given curves at every fraction.

        Raises ValueError naming the key or value and what is accepted.
        """
        if not isinstance(obj, Mapping) or not obj:
            raise ValueError(f"quality curves are {obj!r}: {_SHAPE}")
        by_press: dict[str, Curve] = {}
        stored: dict[Form, float] = {}
        for name, points in obj.items():
            if isinstance(name, str) and "+" in name:
                stored[_stored_form(name)] = _quality(points, f"quality curve of form {name!r}")
            elif name in PRESSES or name == DEFAULT or _is_method(name):
                by_press[name] = _curve(name, points, _number_in_text, " as a string, such as '0.5'")
            else:
                raise ValueError(
                    f"quality curve of press {name!r}: expected one of {', '.join(PRESSES)} or {DEFAULT!r}, or a form "
                    "with a codec, such as exact+int4"
                )
        if by_press:
            by_press.setdefault(DEFAULT, _lowest(by_press.values()))
        return cls(by_press, stored)

    @classmethod
    def measured(cls, qualities: Mapping[Form, float]) -> Curves:
        """Curves of what was measured only: without any, only the exact form is known. Raises ValueError as
        ``from_json`` does.
        """
        points: dict[str, dict[float, float]] = {}
        for form, quality in qualities.items():
            if form.press is not None and form.press not in PRESSES:
                raise ValueError(f"quality curve of press {form.press!r}: expected one of {', '.join(PRESSES)}")
            if form.method is not None and not form.has_lossy_codec:
                points.setdefault(form.method, {})[form.kept_fraction] = quality
        by_press = {press: _curve(press, curve, _number, "") for press, curve in points.items()}
        stored = {
            form: _quality(quality, f"quality curve of form {form}")
            for form, quality in qualities.items()
            if form.has_lossy_codec
        }
        return cls(by_press, stored)

    @classmethod
    def prior(cls) -> Curves:
        """A guess to start with, the same for every context; it is not measured.

        quality = 1 - (1 - kept)**3 on a grid of hundredths (0.99 at 0.8, 0.875 at 0.5, 0.49 at 0.2) for every
        press; for the control ``random``, which looks at nothing, quality = kept; 0.999, 0.99 and 0.8 for codes of 8,
        4 and 2 bits.
        """
        guess = tuple((index / 100, 1 - (1 - index / 100) ** 3) for index in range(101))
        codecs = {Form(codec="int8"): 0.999, Form(codec="int4"): 0.99, Form(codec="int2"): 0.8}
        return cls({DEFAULT: guess, "random": ((0.0, 0.0), (1.0, 1.0))}, codecs)


def _is_method(name: object) -> bool:
    """True for a press with a layer budget."""
    press, colon, budget = name.partition(":") if isinstance(name, str) else ("", "", "")
    try:
        return bool(colon) and Form.parse(f"{press}@0.5:{budget}").is_uneven
    except ValueError:
        return False


def _stored_form(name: str) -> Form:
    try:
        form = Form.parse_stored(name)
    except ValueError as error:
        raise ValueError(f"quality curve of form {name!r}: {error}") from None
    if not form.has_lossy_codec:
        raise ValueError(f"quality curve of form {name!r}: expected a codec that loses anything")
    return form


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
        quality = _quality(value, where)
        if kept == 1.0 and quality != 1.0:
            raise ValueError(f"{where} is {value!r}: expected 1, everything is kept")
        seen.add(kept)
        curve[kept] = quality
    return tuple(sorted(curve.items()))


def _quality(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{where} is {value!r}: expected a number in [0, 1]")
    return float(value)


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
