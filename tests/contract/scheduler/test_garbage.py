"""Full garbage collections: none while there is something to be done, and one when there is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_evicpress.patches.scheduler import garbage
from sglang_evicpress.patches.scheduler.garbage import IDLE_S, MOST_S, PAUSE_SHARE, FullCollections


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    now = SimpleNamespace(s=1_000.0)
    monkeypatch.setattr(garbage, "time", SimpleNamespace(monotonic=lambda: now.s))
    thresholds = gc.get_threshold()
    yield now
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def old_cycle() -> weakref.ref[Cycle]:
    """Garbage that only a full collection finds; the others have been made often enough since."""
    cycle = Cycle()
    gc.collect(0), gc.collect(1)  # it is old now
    ref = weakref.ref(cycle)
    del cycle
    for _ in range(garbage.LEAST_YOUNG + 1):
        gc.collect(1)
    assert ref() is not None
    return ref


def test_old_garbage_is_collected_once_nothing_has_been_done_for_a_while(clock: SimpleNamespace) -> None:
    collections, cycle = FullCollections(), old_cycle()
    for _ in range(100):
        clock.s += IDLE_S / 2
        collections.begin_round(is_idle=False)
    clock.s += IDLE_S / 2
    collections.begin_round(is_idle=True)
    assert cycle() is not None, "a request ran a moment ago"
    clock.s += IDLE_S
    collections.begin_round(is_idle=True)
    assert cycle() is None


def test_what_was_there_at_the_start_is_not_looked_at_again(clock: SimpleNamespace) -> None:
    before = len(gc.get_objects())
    FullCollections()
    assert gc.get_freeze_count() > before / 2 and len(gc.get_objects()) < before / 2


def test_no_full_collection_comes_by_itself(clock: SimpleNamespace) -> None:
    FullCollections()
    full = []
    note = lambda phase, info: full.append(phase) if info["generation"] == 2 else None  # noqa: E731
    gc.callbacks.append(note)
    try:
        kept = [[index] for index in range(400_000)]
    finally:
        gc.callbacks.remove(note)
    assert full == [] and len(kept) == 400_000


def test_a_collection_that_took_long_is_not_made_again_soon(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    collections, made = FullCollections(), list[float]()

    def collect() -> None:
        made.append(clock.s)
        clock.s += 1.0

    freed = SimpleNamespace(collect=collect, get_count=lambda: (0, 0, 99))
    monkeypatch.setattr(garbage, "gc", freed)
    for _ in range(60):
        clock.s += 1.0
        collections.begin_round(is_idle=True)
    assert made[0] == 1_000.0 + IDLE_S and made[1] - made[0] >= PAUSE_SHARE
    assert len(made) == 2


def test_a_server_that_is_never_idle_is_cleaned_as_well(clock: SimpleNamespace) -> None:
    collections, cycle = FullCollections(), old_cycle()
    clock.s += MOST_S
    collections.begin_round(is_idle=False)
    assert cycle() is None
