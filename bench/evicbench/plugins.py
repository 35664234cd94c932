"""Plugins of these measurements, which SGLang finds in a server by a folder on its path, as it finds ours."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evicbench.paths import BENCH

LOG = "EVICPRESS_BENCH_LOG"
"""Environment of a server: the file that a plugin writes what it sees to, as JSON lines."""

Tell = Callable[..., None]
"""Writes its keywords as a line of the log."""


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


class PluginLog:
    """What a plugin in a server has told so far; ``env`` belongs to the server."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "log.jsonl"
        self.env = {LOG: str(self._file), "PYTHONPATH": path_with(folder)}

    def lines(self, since: int = 0) -> list[Any]:
        """Lines from number ``since`` on."""
        if not self._file.exists():
            return []
        whole, _, _ = self._file.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()[since:]]

    @property
    def num_lines(self) -> int:
        return len(self.lines())


def watch_scheduler(attach: Callable[[Any, Tell], None]) -> None:
    """For a plugin's function, which SGLang calls in each of its processes: ``attach`` gets the scheduler once it is
    made, in a server whose environment names a log."""
    if LOG not in os.environ or multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_init(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        log = Path(os.environ[LOG]).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115

        def tell(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")

        attach(scheduler, tell)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", after_init, HookType.AFTER)
