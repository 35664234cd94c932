"""Codecs: one file each, ``encode`` and ``decode``. ``core.CODECS`` lists them."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from sglang_evicpress.codec.base import Codec, DoesNotFitError, NotFiniteError, StoredFormError
from sglang_evicpress.core import CODECS

__all__ = ["Codec", "DoesNotFitError", "NotFiniteError", "StoredFormError", "get_codec"]


@cache
def get_codec(name: str) -> Codec | None:
    """The codec of that name with its default settings, None for ``raw``, which changes nothing. Raises ValueError with
    the names there are."""
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is not known: expected one of {', '.join(CODECS)}")
    if name == "raw":
        return None
    codec: Codec = import_module(f"{__name__}.{name}").CODEC
    return codec
