"""Full garbage collections: none while there is something to be done, and one when there is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

from sglang_evicpress.patches.scheduler import garbage
from sglang_evicpress.patches.scheduler.garbage import IDLE_S, LEAST_ROUNDS, MOST_S, PAUSE_SHARE, FullCollections


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


def served(collections: FullCollections, clock: SimpleNamespace) -> weakref.ref[Cycle]:
    """Rounds of requests that leave garbage, which only a full collection finds."""
    cycle = Cycle()
    for _ in range(LEAST_ROUNDS):
        clock.s += IDLE_S / 100
        collections.begin_round(is_idle=False)
    ref = weakref.ref(cycle)
    del cycle
    collections.begin_round(is_idle=False)
    assert ref() is not None
    return ref


def test_old_garbage_is_collected_once_nothing_has_been_done_for_a_while(clock: SimpleNamespace) -> None:
    collections = FullCollections()
    cycle = served(collections, clock)
    clock.s += IDLE_S / 2
    collections.begin_round(is_idle=True)
    assert cycle() is not None, "a request ran a moment ago"
    clock.s += IDLE_S
    collections.begin_round(is_idle=True)
    assert cycle() is None


def test_young_garbage_is_collected_every_few_rounds(clock: SimpleNamespace) -> None:
    """As many old objects may be freed meanwhile: then Python collects nothing."""
    collections = FullCollections()
    cycle = Cycle()
    ref = weakref.ref(cycle)
    del cycle
    for _ in range(garbage.ROUNDS_PER_LOOK):
        assert ref() is not None, "each look takes half a millisecond, which every token would wait for"
        has_looked = collections.begin_round(is_idle=False)
        assert has_looked == (ref() is None), "what else is to be done in that round may wait"
    assert ref() is None


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

    def collect(generation: int = 2) -> int:
        if generation == 2:
            made.append(clock.s)
            clock.s += 1.0
        return 0

    monkeypatch.setattr(garbage, "gc", SimpleNamespace(collect=collect))
    for _ in range(90):
        for _ in range(LEAST_ROUNDS):
            collections.begin_round(is_idle=False)
        for _ in range(2):
            clock.s += 1.0
            collections.begin_round(is_idle=True)
    pauses = [after - before for before, after in pairwise(made)]
    assert len(pauses) > 1 and pauses[0] >= PAUSE_SHARE and pauses[1] >= 2.0 * PAUSE_SHARE  # nothing was found


def test_nothing_is_collected_again_where_nothing_was_done(clock: SimpleNamespace) -> None:
    collections, full = FullCollections(), list[str]()
    served(collections, clock)
    note = lambda phase, info: full.append(phase) if info["generation"] == 2 else None  # noqa: E731
    gc.callbacks.append(note)
    try:
        for _ in range(100):
            clock.s += IDLE_S
            collections.begin_round(is_idle=True)
    finally:
        gc.callbacks.remove(note)
    assert full == ["start", "stop"]


def test_a_server_that_is_never_idle_is_cleaned_as_well(clock: SimpleNamespace) -> None:
    collections = FullCollections()
    cycle = served(collections, clock)
    clock.s += MOST_S
    assert collections.begin_round(is_idle=False), "what else is to be done in that round may wait"
    assert cycle() is None
