"""Pictures that commands write: their paths are checked before any work, and a file appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_evicpress.files import WholeFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def check_picture(path: str) -> None:
    """Raise ValueError where ``path`` names neither PNG nor SVG, or matplotlib is not installed."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path!r}: expected a path that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(f"{path!r} needs matplotlib: pip install 'sglang-evicpress[plot]'") from None


def write_picture(figure: Figure, path: str) -> None:
    """Write a PNG or SVG; the type follows from the name."""
    with WholeFile(path) as file:
        figure.savefig(file.stream, format=Path(path).suffix.lower().removeprefix("."))
        file.commit()
