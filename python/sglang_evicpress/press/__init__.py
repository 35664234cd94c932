"""Presses: one file each, one verb, ``score``. ``select`` turns scores into survivors.

``PRESSES`` holds each under its name with its default settings; other settings are made from the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang_evicpress.press.base import Press, PressInput, QueryWindow, select
from sglang_evicpress.press.keydiff import KeyDiff
from sglang_evicpress.press.knorm import Knorm
from sglang_evicpress.press.random import Random
from sglang_evicpress.press.snapkv import SnapKV
from sglang_evicpress.press.streaming import Streaming
from sglang_evicpress.press.value_key_ratio import ValueKeyRatio

__all__ = ["PRESSES", "Press", "PressInput", "QueryWindow", "get_press", "select"]

_DEFAULTS: tuple[Press, ...] = (KeyDiff(), Knorm(), SnapKV(), ValueKeyRatio(), Streaming(), Random())
PRESSES: Mapping[str, Press] = MappingProxyType({press.name: press for press in _DEFAULTS})


def get_press(name: str) -> Press:
    """The press of that name with its default settings. Raises ValueError with the names there are."""
    try:
        return PRESSES[name]
    except KeyError:
        raise ValueError(f"press {name!r} is not known: expected one of {', '.join(PRESSES)}") from None
