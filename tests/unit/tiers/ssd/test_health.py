"""Free space of the file system: asked seldom, and anew before anything is refused."""

from __future__ import annotations

import pytest

from sglang_evicpress.tiers.ssd import health
from sglang_evicpress.tiers.ssd.health import FreeSpace

MiB = 1 << 20
TOTAL = 200 * MiB  # 64 MiB of it are left to others


class Disk:
    def __init__(self) -> None:
        self.free, self.num_asked = 100 * MiB, 0

    def answer(self) -> tuple[int, int]:
        self.num_asked += 1
        return self.free, TOTAL


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def space(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> FreeSpace:
    monkeypatch.setattr(health, "FRESH_S", 3600.0)
    return FreeSpace(disk.answer)


def test_many_small_ones_are_taken_on_one_answer(disk: Disk, space: FreeSpace) -> None:
    assert all(space.take(MiB // 16, 0, 5.0) for _ in range(100))
    assert disk.num_asked == 1


def test_an_old_answer_refuses_nothing_and_grants_no_more_than_it_said(disk: Disk, space: FreeSpace) -> None:
    assert space.take(20 * MiB, 0, 5.0)
    disk.free = 80 * MiB  # they are written
    assert not space.take(17 * MiB, 0, 5.0)
    assert space.take(16 * MiB, 0, 5.0) and disk.num_asked == 2
    disk.free = 200 * MiB
    assert space.take(60 * MiB, 10 * MiB, 5.0) and disk.num_asked == 3
    assert not space.take(60 * MiB, 80 * MiB, 5.0), "what is reserved and not written yet counts"


def test_an_answer_ages(disk: Disk, space: FreeSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert space.take(MiB, 0, 5.0)
    monkeypatch.setattr(health, "FRESH_S", 0.0)
    disk.free = 0
    assert not space.take(MiB, 0, 5.0) and disk.num_asked == 2
