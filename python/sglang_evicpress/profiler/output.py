"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def check_output(path: str, *, inputs: Iterable[str] = ()) -> str:
    """``path``, if a file can be written there that is none of ``inputs``; else ValueError, before work is done."""
    real = Path(path).resolve()
    if any(real == Path(given).resolve() for given in inputs):
        raise ValueError(f"{path!r} is read from: expected a file of its own")
    if real.exists() and not real.is_file():
        raise ValueError(f"{path!r} is no file: expected the path of one")
    if not real.parent.is_dir():
        raise ValueError(f"{path!r}: the folder {str(Path(path).parent)!r} does not exist")
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path!r}: nothing can be written to the folder {str(Path(path).parent)!r}")
    return path


def write_whole(path: str, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it there; through a link, what it leads to is replaced."""
    real = Path(path).resolve()
    number, name = tempfile.mkstemp(dir=real.parent, prefix=".evicpress.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp makes it private; this is a file like any other
        Path(name).replace(real)
    finally:
        Path(name).unlink(missing_ok=True)
