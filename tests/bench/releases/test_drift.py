"""A wheel's source says which rows of the hook table it has."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from evicbench.releases import drift

from sglang_evicpress.patches.hook_points import SUPPORTED_SGLANG, HookPoint

SOURCES = {
    "sglang/__init__.py": "",
    "sglang/utils/__init__.py": "from sglang.utils.common import *\nfrom .paths import root as folder\n",
    "sglang/utils/common.py": "def kill(pid, *others, force=False, **options): ...\n",
    "sglang/utils/paths.py": "if True:\n    def root(): ...\n",
    "sglang/cache.py": (
        "from sglang.base import Base\nSIZE: int = 3\n"
        "class Cache(Base):\n"
        "    def __init__(self, params):\n        self.pool = params\n"
        "    @classmethod\n    def made(cls, batch): ...\n"
    ),
    "sglang/made.py": "class Arguments:\n    def resolve(self): ...\nArguments = struct(vars(Arguments))\n",
    "sglang/base.py": "class Base:\n    async def match(self, key): ...\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "sglang-0.9.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in SOURCES.items():
            archive.writestr(name, source)
    return path


def row(path: str, parameters: str | None = None) -> HookPoint:
    return HookPoint(path, "read", "scheduler", None if parameters is None else tuple(parameters.split()))


def test_rows_that_are_there(wheel: Path) -> None:
    rows = (
        row("sglang.utils.kill", "pid others force options"),
        row("sglang.utils.folder", ""),
        row("sglang.cache.SIZE"),
        row("sglang.cache.Cache", "self params"),
        row("sglang.cache.Cache.pool"),
        row("sglang.cache.Cache.made", "batch"),
        row("sglang.cache.Cache.match", "self key"),
        row("sglang.made.Arguments.resolve", "self"),
    )
    assert list(drift.differences(drift.Wheel(wheel), rows)) == []


def test_rows_that_differ(wheel: Path) -> None:
    rows = (
        row("sglang.utils.kill", "pid"),
        row("sglang.utils.root"),
        row("sglang.cache.Cache.match", "self"),
        row("sglang.cache.Cache.evict"),
        row("sglang.gone.Cache"),
    )
    assert list(drift.differences(drift.Wheel(wheel), rows)) == [
        "sglang.utils.kill takes (pid, others, force, options) instead of (pid)",
        "sglang.utils.root is missing",
        "sglang.cache.Cache.match takes (self, key) instead of (self)",
        "sglang.cache.Cache.evict is missing",
        "sglang.gone.Cache is missing",
    ]


def test_a_release_that_is_not_known_is_compared_with_the_newest_that_is(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main(["--wheel", str(wheel)]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("SGLang 0.9.1: ") and first.endswith(f"rows differ from those of {SUPPORTED_SGLANG[-1]}")
