"""Damage of any kind, a little of it: `make show-trust` has a million inputs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from evicbench.trust.fuzz import fuzz, readers
from evicbench.trust.mutator import mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.tiers.entry.encoding import decode, peek
from sglang_evicpress.tiers.entry.header import BadEntry

NUM_INPUTS = 40


def test_no_reader_crashes_or_hits(tmp_path: Path) -> None:
    found = readers(tmp_path, random.Random("samples"))
    for what, reader in found.items():
        ends, problems = fuzz(reader, random.Random(what), NUM_INPUTS if reader.share > 0.004 else 4)
        assert not problems, (what, problems[:2])
        assert ends.total() > 0


def test_a_reader_that_crashes_is_found(tmp_path: Path) -> None:
    reader = readers(tmp_path, random.Random("samples"))["records"]
    lenient = type(reader)(reader.samples, reader.read, (), reader.share)
    _, problems = fuzz(lenient, random.Random(0), 20)
    assert problems and "BadEntry" in problems[0]


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_no_record(data: bytes) -> None:
    for read in (decode, peek):
        with pytest.raises(BadEntry):
            read(data)


def test_equal_seeds_damage_alike() -> None:
    one, other = (mutated(random.Random(7), bytes(100), [b"x" * 50]) for _ in range(2))
    assert one == other
