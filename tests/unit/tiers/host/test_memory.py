"""Sizes of a host tier that nobody chose, and what control groups leave of a machine's memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_evicpress.config import GB, MIN_TIER_BYTES
from sglang_evicpress.tiers.host import memory as module
from sglang_evicpress.tiers.host.memory import Memory, auto_bytes, read_memory

NO_LIMIT = 9223372036854771712  # of version 1


@pytest.mark.parametrize(
    ("total_gb", "free_gb", "pool_gb", "expected_gb"),
    [
        (256, 200, 10, 40),  # four pools
        (256, 200, 100, (200 - 25.6) / 2),  # half of what is beyond a tenth
        (32, 20, 100, (20 - 4) / 2),  # half of what is beyond 4 GB
        (32, 4.03, 1, 0),  # less than the smallest tier
        (32, 4.04, 1, 0.02),
        (32, 3, 1, 0),  # less than the reserve
        (32, 20, 0.001, 0.016),  # no less than the smallest tier
    ],
)
def test_size_of_a_tier_that_nobody_chose(total_gb: float, free_gb: float, pool_gb: float, expected_gb: float) -> None:
    memory = Memory(round(total_gb * GB), round(free_gb * GB))
    assert auto_bytes(memory, round(pool_gb * GB)) == pytest.approx(expected_gb * GB, abs=1)
    assert auto_bytes(memory, 0) in (0, MIN_TIER_BYTES)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=900))


def group(folder: Path, version: int, limit: object, usage: int, inactive: int = 0, active: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "total_" if version == 1 else ""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    stat = f"anon 1\nfile 400\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\nshmem 7\n"
    (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize(
    ("version", "lines", "root"),
    [(2, "0::/slice/own\n", ""), (1, "9:name=systemd:/\n4:cpu,memory:/slice/own\n0::/\n", "memory")],
)
def test_the_tightest_group_from_the_own_one_up_counts(tmp_path: Path, version: int, lines: str, root: str) -> None:
    own, mount = tmp_path / "own", tmp_path / "cgroup"
    own.write_text(lines)
    inner, outer = mount / root / "slice" / "own", mount / root / "slice"
    group(inner, version, 700, 500, inactive=150, active=50)
    assert read_memory(mount, own) == Memory(700, 400), "page cache is free"
    group(outer, version, 600, 580)
    assert read_memory(mount, own) == Memory(600, 20), "the group above leaves less"
    group(outer, version, "max" if version == 2 else NO_LIMIT, 580)
    assert read_memory(mount, own) == Memory(700, 400)
    group(inner, version, 700, 800)
    assert read_memory(mount, own) == Memory(700, 0)
    group(inner, version, 5000, 100)
    assert read_memory(mount, own) == Memory(1000, 900), "no more than the machine has"


@pytest.mark.parametrize(("version", "lines", "root"), [(2, "0::/../x\n", ""), (1, "4:memory:/docker/1\n", "memory")])
def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path, version: int, lines: str, root: str) -> None:
    own, mount = tmp_path / "own", tmp_path / "cgroup"
    own.write_text(lines)
    group(mount / root, version, 300, 100)
    assert read_memory(mount, own) == Memory(300, 200)


@pytest.mark.parametrize("content", [None, "", "4:memory:/\n", "0::/\n"])
def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path, content: str | None) -> None:
    own = tmp_path / "own"
    if content is not None:
        own.write_text(content)
    assert read_memory(tmp_path / "cgroup", own) == Memory(1000, 900)
    group(tmp_path / "cgroup", 2, "no number", 3)
    assert read_memory(tmp_path / "cgroup", own) == Memory(1000, 900)
