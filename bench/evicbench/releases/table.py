"""README's table of releases: what was measured on each, written by `make show-releases`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

AREAS = ("install", "contract", "exactness", "stock", "salts", "restart", "budgets", "storm")
_WORDS = {True: "ok", False: "**missed**", None: "-"}
_ROW = re.compile(r"^\| (\d+\.\d+\S*) \|.*$", re.MULTILINE)


def row(version: str, found: Mapping[str, bool], where: str) -> str:
    """``found``: whether every line of an area was as it should be; ``where``: commit, versions, date."""
    return f"| {version} | {' | '.join(_WORDS[found.get(area)] for area in AREAS)} | {where} |"


def with_row(readme: str, version: str, line: str) -> str:
    """README with the row of a release. Raises ValueError where its table has none for it."""
    num_rows = sum(match[1] == version for match in _ROW.finditer(readme))
    if num_rows != 1:
        raise ValueError(f"README has {num_rows} rows of SGLang {version}: expected one")
    return _ROW.sub(lambda match: line if match[1] == version else match[0], readme)


def write_row(path: Path, version: str, line: str) -> None:
    path.write_text(with_row(path.read_text(encoding="utf-8"), version, line), encoding="utf-8")
