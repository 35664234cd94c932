"""Output of tables and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evicbench.paths import OUT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = OUT / "profiler"


def save_text(name: str, text: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / name).write_text(text)


def save_figure(name: str, figure: Figure) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / name, dpi=110)
