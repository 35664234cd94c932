"""The index of the SSD tier against a plain list, and what it costs in memory."""

from __future__ import annotations

import gc
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_evicpress.tiers.ssd.index import Index, Place, Ref
from sglang_evicpress.tiers.ssd.scan import ScannedRecords

LOOKUP_KEYS = [0, 5, 2**63 - 1]


def place_of(number: int) -> Place:
    return Place(100 * number, 90 + number % 7, 4096 * number, 1000 * number, number)


def records_of(numbers: list[int], lookup_keys: list[int]) -> ScannedRecords:
    places = [place_of(number) for number in numbers]
    return ScannedRecords(
        np.array([b""] * len(numbers), dtype="S16"),
        np.array([place.record_offset for place in places], dtype=np.int64),
        np.array([place.record_bytes for place in places], dtype=np.int64),
        np.array(lookup_keys, dtype=np.int64),
        np.array([place.payload_offset for place in places], dtype=np.int64),
        np.array([place.payload_bytes for place in places], dtype=np.int64),
        np.array([place.num_tokens for place in places], dtype=np.int64),
        np.ones(len(places), dtype=bool),
    )


class _Machine(RuleBasedStateMachine):
    """Segments are only ever added behind the last one, as a store does."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.held: list[tuple[Ref, int, Place]] = []
        self.gone: list[Ref] = []
        self.segment = 1
        self.number = 0

    @rule(lookup_key=st.sampled_from(LOOKUP_KEYS))
    def add(self, lookup_key: int) -> None:
        self.number += 1
        place = place_of(self.number)
        self.held.append((self.index.add(self.segment, lookup_key, place), lookup_key, place))

    @rule(lookup_keys=st.lists(st.sampled_from(LOOKUP_KEYS), max_size=5))
    def add_all(self, lookup_keys: list[int]) -> None:
        self.segment += 1
        numbers = list(range(self.number + 1, self.number + 1 + len(lookup_keys)))
        self.number += len(lookup_keys)
        self.index.add_all(self.segment, records_of(numbers, lookup_keys))
        for row, (number, lookup_key) in enumerate(zip(numbers, lookup_keys, strict=True)):
            place = place_of(number)
            self.held.append((Ref(self.segment, row, place.payload_bytes, place.num_tokens), lookup_key, place))

    @rule()
    def next_segment(self) -> None:
        self.segment += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ref, _, place = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert self.index.remove(ref) == place
        assert self.index.remove(ref) is None
        self.gone.append(ref)

    @rule(data=st.data())
    def remove_segment(self, data: st.DataObject) -> None:
        segment = data.draw(st.integers(1, self.segment))
        self.gone += [ref for ref, _, _ in self.held if ref.segment == segment]
        self.index.remove_segment(segment)
        self.held = [held for held in self.held if held[0].segment != segment]
        self.segment += 1  # numbers are not used again

    @invariant()
    def agrees(self) -> None:
        index = self.index
        assert len(index) == len(self.held)
        for lookup_key in [*LOOKUP_KEYS, 77]:
            assert index.find(lookup_key) == [ref for ref, other, _ in reversed(self.held) if other == lookup_key]
        refs = [ref for ref, _, _ in self.held]
        assert index.refs_behind(None, 1000) == refs
        for at, (ref, _, place) in enumerate(self.held):
            assert index.place(ref) == place and ref in index
            assert index.refs_behind(ref, 2) == refs[at + 1 : at + 3]
        for ref in self.gone:
            assert ref not in index
        for segment in range(1, self.segment + 1):
            places = [place for ref, _, place in self.held if ref.segment == segment]
            assert index.places(segment) == places


TestMachine = _Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("num_entries", [43_500, 44_000])
def test_entry_takes_less_than_200_bytes(num_entries: int) -> None:
    """On both sides of the number at which the dict doubles."""
    draw = random.Random(1)
    tracemalloc.start()
    try:
        index = Index()
        per_segment = 10_000
        for segment in range(-(-num_entries // per_segment)):
            count = min(per_segment, num_entries - segment * per_segment)
            lookup_keys = [draw.getrandbits(63) for _ in range(count)]
            index.add_all(segment + 1, records_of(list(range(count)), lookup_keys))
            del lookup_keys
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == num_entries
    assert used / num_entries < 200


def test_entries_one_by_one_take_less_than_200_bytes() -> None:
    draw = random.Random(1)
    tracemalloc.start()
    try:
        index = Index()
        for number in range(22_000):
            index.add(1 + number // 5000, draw.getrandbits(63), place_of(number))
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / 22_000 < 200
