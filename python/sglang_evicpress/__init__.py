"""EvicPress for SGLang: compressed shared prefixes, chosen by measured utility. Importing it does nothing."""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

for _folder in (_Path(__file__).parent / "kernels", _Path(__file__).parent / "patches"):
    if not _folder.is_dir():
        raise ImportError(
            f"{_folder} is not a folder: expected a link to the one of that name at the top, which unpacking an "
            "archive may lose; run `pip install .` or `make setup` there once, which restores it"
        )
