"""Errors in logs, without the values they carry: those may be a user's prompt."""

from __future__ import annotations

import traceback
from pathlib import Path


def code_path(error: BaseException) -> str:
    """Type of an error and where it came from, innermost call first: ``KeyError at tree.py:12 in f, a.py:3 in g``."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    path = ", ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(error).__name__} at {path}" if path else type(error).__name__
