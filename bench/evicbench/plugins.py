"""Plugins of these measurements, which SGLang finds in a server by a folder on its path, as it finds ours."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evicbench.paths import BENCH


@contextmanager
def plugin_folder(name: str, target: str) -> Iterator[Path]:
    """A folder that says that ``target``, MODULE:FUNCTION, is the plugin ``name``; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="evicpress-plugin-"))
    try:
        info = folder / f"{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def path_with(folder: Path) -> str:
    """PYTHONPATH for a server to find the plugin and its module."""
    return os.pathsep.join(filter(None, (str(folder), str(BENCH), os.environ.get("PYTHONPATH", ""))))
