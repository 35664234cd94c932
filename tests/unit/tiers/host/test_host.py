"""Host entries: who keeps their bytes, and that no changed byte passes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sglang_evicpress.core import EXACT
from sglang_evicpress.tiers.entry.copies import HostEntry
from sglang_evicpress.tiers.entry.header import BadEntry, Header, Shape, extent_of
from sglang_evicpress.tiers.faults import Faults
from sglang_evicpress.tiers.host.tier import HostTier

NUM_BYTES = 1 << 20
SHAPE = Shape(2, 1, 16, "float16", 1)


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier(NUM_BYTES, is_pinned=False)
    yield tier
    tier.close()


def put(host: HostTier, num_tokens: int = 200, seed: int = 0) -> HostEntry:
    """An entry with its payload, which nobody holds or has pinned yet."""
    size = SHAPE.layer_bytes(num_tokens)
    payload = random.Random(seed).randbytes(2 * size)
    runs = host.arena.extents.alloc(len(payload))
    assert runs is not None
    done = 0
    for chunk in host.arena.buffers(runs, 0, len(payload)):
        chunk[:] = payload[done : done + len(chunk)]
        done += len(chunk)
    extents = tuple(extent_of(begin, [payload[begin : begin + size]]) for begin in (0, size))
    key = bytes(16)
    return HostEntry(
        Header(key, key, key, key, 0, bytes(4 * num_tokens), EXACT, False, num_tokens, SHAPE, extents), runs
    )


def test_an_entry_lives_as_long_as_somebody_holds_it_or_has_it_pinned(host: HostTier) -> None:
    entry = put(host)
    used = host.arena.extents.used_bytes
    host.pin(entry)
    assert entry.num_bytes == used and host.num_entries == 1
    host.hold(entry, 1)
    host.hold(entry, 2)
    host.pin(entry)
    host.unpin(entry)
    host.release(entry, 1)
    host.release(entry, 1)  # twice is once
    assert entry.owners == {2}
    host.release(entry, 2)
    assert host.arena.extents.used_bytes == used and host.entries() == [entry]
    host.unpin(entry)
    assert host.arena.extents.used_bytes == host.num_entries == 0 and not entry.runs
    assert host.free_bytes == host.num_bytes == NUM_BYTES


def test_any_order_of_holders_and_pins_frees_once(host: HostTier) -> None:
    rng = random.Random(0)
    live: dict[int, HostEntry] = {}
    for step in range(600):
        if len(live) < 8 and rng.random() < 0.3:
            entry = put(host, rng.randrange(1, 400), step)
            host.hold(entry, step)
            live[id(entry)] = entry
        elif live:
            entry = rng.choice(list(live.values()))
            kind = rng.randrange(4)
            if kind == 0:
                host.hold(entry, step)
            elif kind == 1 and entry.owners:
                host.release(entry, rng.choice(sorted(entry.owners)))
            elif kind == 2:
                host.pin(entry)
            elif entry.pins:
                host.unpin(entry)
            if not entry.owners and not entry.pins:
                del live[id(entry)]
        assert {id(entry) for entry in host.entries()} == set(live)
        assert host.arena.extents.used_bytes == sum(entry.num_bytes for entry in live.values())
    assert live


def test_check_finds_every_kind_of_flip(host: HostTier) -> None:
    entry = put(host)
    host.pin(entry)
    host.check(entry)
    size = entry.header.payload_bytes
    for at in (0, 1, size // 2 - 1, size // 2, size - 1):
        (chunk,) = host.arena.buffers(entry.runs, at, 1)
        for bit in (0, 7):
            chunk[0] ^= 1 << bit
            with pytest.raises(BadEntry, match="checksum"):
                host.check(entry)
            chunk[0] ^= 1 << bit
    host.check(entry)


def test_check_reads_only_the_payload(host: HostTier) -> None:
    entry = put(host, 3)
    taken = sum(run.num_bytes for run in entry.runs)
    assert taken > entry.header.payload_bytes
    (rest,) = host.arena.buffers(entry.runs, entry.header.payload_bytes, taken - entry.header.payload_bytes)
    rest[:] = b"\xff" * len(rest)
    host.check(entry)


def test_a_flip_on_purpose_is_found() -> None:
    host = HostTier(NUM_BYTES, is_pinned=False, faults=Faults(rates={"flip": 1.0}))
    entry = put(host)
    host.pin(entry)
    with pytest.raises(BadEntry, match="checksum"):
        host.check(entry)
    host.faults.is_on = False
    with pytest.raises(BadEntry, match="checksum"):  # it really is in memory
        host.check(entry)
    host.close()


def test_what_a_check_took_is_told_once(host: HostTier) -> None:
    entry = put(host)
    entry.check_seconds = 0.25
    assert (entry.take_check_seconds(), entry.take_check_seconds()) == (0.25, 0.0)
