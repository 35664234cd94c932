"""Folders: the repository, what of `bench/` the benchmarks read, and where they write."""

from __future__ import annotations

import os
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
OUT = Path(os.environ.get("EVICPRESS_OUT") or BENCH / "out").absolute()
"""Tables, plots and raw figures; `show.py --out` names another folder."""


def out_file(area: str, name: str) -> Path:
    """A file below ``OUT``, whose folder is made."""
    path = OUT / area / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
