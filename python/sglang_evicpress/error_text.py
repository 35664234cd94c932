"""Errors in logs, without the values they carry: those may be a user's prompt."""

from __future__ import annotations

import reprlib
import traceback
from pathlib import Path


def code_path(error: BaseException) -> str:
    """Type of an error and where it came from, innermost call first: ``KeyError at tree.py:12 in f, a.py:3 in g``."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    path = ", ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(error).__name__} at {path}" if path else type(error).__name__


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 100, 100, 40


def short_repr(value: object) -> str:
    """``value`` for an error, cut: what a client sends may be long, and nested deeper than ``repr`` goes."""
    return _SHORT.repr(value)
