"""Presses: one file each, one verb, ``score``. ``select`` turns scores into survivors. ``core.PRESSES`` lists them."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from sglang_evicpress.core import PRESSES
from sglang_evicpress.press.base import Press, PressInput, QueryWindow, scored, select

__all__ = ["Press", "PressInput", "QueryWindow", "get_press", "scored", "select"]


@cache
def get_press(name: str) -> Press:
    """The press of that name with its default settings. Raises ValueError with the names there are."""
    if name not in PRESSES:
        raise ValueError(f"press {name!r} is not known: expected one of {', '.join(PRESSES)}")
    press: Press = import_module(f"{__name__}.{name}").PRESS
    return press
