"""Folders: the repository, what of `bench/` the benchmarks read, and where they write."""

from __future__ import annotations

import os
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
OUT = Path(os.environ.get("EVICPRESS_OUT") or BENCH / "out").absolute()
"""Tables, plots and raw figures; `show.py --out` names another folder."""
