"""Entries as values of an engine: what was published comes back, and nothing else does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.tiers.entry.header import BadEntry, Header, Shape, extent_of
from sglang_evicpress.tiers.entry.identity import token_bytes
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.external import entries
from sglang_evicpress.tiers.external.circuit import Circuit
from sglang_evicpress.tiers.external.entries import INDEX_BYTES, NUM_PLACES, SharedEntries, level_of

SHAPE = Shape(2, 1, 16, "float16", 4)
KEY = bytes(16)
PAGE = 4 * SHAPE.page_size


class Engine:
    """Values in a dictionary. ``room``: bytes that it takes."""

    name = "dictionary"

    def __init__(self, room: int = 1 << 30) -> None:
        self.values: dict[str, bytes] = {}
        self.room = room
        self.is_down = False
        self.is_closed = False

    def has(self, key: str) -> bool:
        self._answer()
        return key in self.values

    def put(self, key: str, value: memoryview) -> bool:
        self._answer()
        if key in self.values:
            return True
        if sum(map(len, self.values.values())) + len(value) > self.room:
            return False
        self.values[key] = bytes(value)
        return True

    def get(self, key: str, target: memoryview) -> bool:
        self._answer()
        value = self.values.get(key)
        if value is None:
            return False
        if len(value) != len(target):
            raise OSError("another size")
        target[:] = value
        return True

    def close(self) -> None:
        self.is_closed = True

    def _answer(self) -> None:
        if self.is_down:
            raise OSError("connection refused")


def shared(engine: Engine, key: Key | None = None) -> SharedEntries:
    return SharedEntries(engine, Circuit("test"), key)


def made(num_tokens: int = 40, seed: int = 0, form: Form = EXACT) -> tuple[Header, bytes]:
    size = SHAPE.layer_bytes(num_tokens)
    payload = random.Random(seed).randbytes(2 * size)
    extents = tuple(extent_of(begin, [payload[begin : begin + size]]) for begin in (0, size))
    tokens = token_bytes([random.Random(seed).randrange(1000) for _ in range(num_tokens)])
    return Header(KEY, KEY, KEY, KEY, 0, tokens, form, False, num_tokens, SHAPE, extents), payload


def in_chunks(data: bytearray, rng: random.Random) -> list[memoryview]:
    """The same memory in pieces, as an arena has it."""
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(4)))})
    view = memoryview(data)
    return [view[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]


def found(store: SharedEntries, header: Header, tokens: bytes | None = None) -> entries.FoundEntry | None:
    """The entry that a reader of these tokens finds, or of those of the header."""
    wanted = header.tokens if tokens is None else tokens
    for name in store.names(header.parent_key, wanted, PAGE):
        entry = store.find(name, wanted)
        if entry is not None:
            return entry
    return None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 10**6), st.sampled_from([64, 1000, 4096, 1 << 20]), st.booleans())
def test_what_was_published_is_found_and_read_bit_for_bit(
    num_pages: int, seed: int, part_bytes: int, is_sealed: bool
) -> None:
    rng, engine, key = random.Random(seed), Engine(), Key(b"s" * 32) if is_sealed else None
    header, payload = made(4 * num_pages, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "PART_BYTES", part_bytes)
        assert shared(engine, key).publish(header, in_chunks(bytearray(payload), rng)) == (True, True)
    other = shared(engine, key)  # of another server, which cuts by what the index says
    one = found(other, header)
    assert one is not None and (one.header.tokens, one.header.form) == (header.tokens, EXACT)
    target = bytearray(len(payload))
    other.read(one, in_chunks(target, rng))
    assert bytes(target) == payload


def test_the_second_writer_leaves_what_is_there() -> None:
    engine = Engine()
    header, payload = made()
    assert shared(engine).publish(header, [memoryview(payload)]) == (True, True)
    before = dict(engine.values)
    assert shared(engine).publish(header, [memoryview(payload)]) == (True, False)
    assert engine.values == before


def test_an_exact_entry_is_preferred_and_a_lossy_one_kept_beside_it() -> None:
    engine, header, payload = Engine(), *made(40, form=Form(codec="int8"))
    size = SHAPE.stored_bytes(40, "int8")
    from sglang_evicpress.codec.layout import stored_header

    layer = stored_header("int8", 40)
    coded = (layer + bytes(size - len(layer))) * 2
    extents = tuple(extent_of(begin, [coded[begin : begin + size]]) for begin in (0, size))
    lossy = Header(KEY, KEY, KEY, KEY, 0, header.tokens, header.form, False, 40, SHAPE, extents)
    assert level_of(lossy) == "lossy" and shared(engine).publish(lossy, [memoryview(coded)]) == (True, True)
    assert found(shared(engine), header).header.form == header.form
    exact, payload = made(40)
    assert shared(engine).publish(exact, [memoryview(payload)]) == (True, True)
    assert found(shared(engine), header).header.form == EXACT


def test_no_changed_lost_or_short_value_is_served() -> None:
    header, payload = made()
    engine = Engine()
    assert shared(engine).publish(header, [memoryview(payload)])
    whole, rng = dict(engine.values), random.Random(0)
    num_misses = num_served = 0
    for _ in range(2000):
        engine.values = dict(whole)
        name = rng.choice(sorted(whole))
        value = bytearray(whole[name])
        kind = rng.choice(["flip", "flip", "flip", "cut", "lose", "swap", "grow"])
        if kind == "flip":
            value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del value[rng.randrange(len(value)) :]
        elif kind == "grow":
            value += b"x"
        elif kind == "swap":
            value = bytearray(whole[rng.choice([other for other in whole if other != name])])
        engine.values[name] = bytes(value)
        if kind == "lose":
            del engine.values[name]
        store, target = shared(engine), bytearray(len(payload))
        try:
            one = found(store, header)
            if one is None:
                num_misses += 1
                continue
            store.read(one, [memoryview(target)])
        except (BadEntry, OSError):
            num_misses += 1
            continue
        num_served += 1
        assert bytes(target) == payload, (name, kind)
    assert num_misses > 1900 and num_served < 100  # two values that swap places may be the same part


def test_what_was_damaged_once_is_not_read_again() -> None:
    header, payload = made()
    engine = Engine()
    shared(engine).publish(header, [memoryview(payload)])
    part = next(name for name in engine.values if name.endswith("-0"))
    engine.values[part] = bytes(len(engine.values[part]))
    store = shared(engine)
    with pytest.raises(BadEntry, match="checksum"):
        store.read(found(store, header), [memoryview(bytearray(len(payload)))])
    with pytest.raises(BadEntry, match="of no use before"):
        found(store, header)
    assert store.publish(header, [memoryview(payload)]) == (True, True)  # in the next place
    assert len([name for name in engine.values if name.endswith("-exact-1")]) == 1
    target = bytearray(len(payload))
    store.read(found(store, header), [memoryview(target)])
    assert target == payload
    other = shared(engine)
    with pytest.raises(BadEntry, match="checksum"):  # nobody has told it
        other.read(found(other, header), [memoryview(bytearray(len(payload)))])
    other.read(found(other, header), [memoryview(target)])
    assert target == payload


def test_what_is_damaged_each_time_is_given_up() -> None:
    header, payload = made()
    engine = Engine()
    store = shared(engine)
    for _ in range(entries.NUM_ATTEMPTS):
        before = set(engine.values)
        assert store.publish(header, [memoryview(payload)]) == (True, True)
        (part,) = (name for name in set(engine.values) - before if name.endswith("-0") and "exact" not in name)
        engine.values[part] = bytes(len(engine.values[part]))
        with pytest.raises(BadEntry, match="checksum"):
            store.read(found(store, header), [memoryview(bytearray(len(payload)))])
    assert store.publish(header, [memoryview(payload)]) == (False, False)


def test_what_a_store_that_was_away_did_not_hand_over_is_read_later() -> None:
    header, payload = made()
    engine, now_s = Engine(), [0.0]
    shared(engine).publish(header, [memoryview(payload)])
    circuit = Circuit("test", lambda: now_s[0])
    store = SharedEntries(engine, circuit, None, lambda: now_s[0])
    entry, target = found(store, header), bytearray(len(payload))
    circuit.fail("read", "of another thread")
    with pytest.raises(BadEntry, match="deadline"):
        store.read(entry, [memoryview(target)])
    now_s[0] = 2.0
    store.read(found(store, header), [memoryview(target)])
    assert target == payload
    whole, engine.values = engine.values, {}
    with pytest.raises(BadEntry, match="missing"):
        store.read(entry, [memoryview(target)])
    engine.values = whole
    with pytest.raises(BadEntry, match="of no use before"):
        found(store, header)
    now_s[0] += entries.MISSING_S
    store.read(found(store, header), [memoryview(target)])
    assert target == payload


def test_what_loses_its_header_again_and_again_takes_one_place() -> None:
    header, payload = made()
    engine = Engine()
    for _ in range(2 * NUM_PLACES):
        assert shared(engine).publish(header, [memoryview(payload)]) == (True, True)
        assert found(shared(engine), header) is not None
        del engine.values[next(name for name in engine.values if name.endswith("-header"))]
    assert not [name for name in engine.values if name.endswith("-exact-1")]


def test_what_has_lost_its_payload_is_published_anew() -> None:
    header, payload = made()
    engine = Engine()
    shared(engine).publish(header, [memoryview(payload)])
    for name in [name for name in engine.values if name.endswith("-0") and "exact" not in name]:
        del engine.values[name]
    assert shared(engine).publish(header, [memoryview(payload)]) == (True, True)
    target = bytearray(len(payload))
    store = shared(engine)
    store.read(found(store, header), [memoryview(target)])
    assert target == payload


def test_contexts_that_begin_alike_stand_beside_each_other() -> None:
    engine = Engine()
    first, first_payload = made(800, 1)
    begin = first.tokens[: 4 * 40]
    others = []
    for seed in range(2, 8):
        header, payload = made(800, seed)
        others.append((replace(header, tokens=begin + header.tokens[len(begin) :]), payload))
    every = [(first, first_payload), *others]
    for header, payload in every:
        assert shared(engine).publish(header, [memoryview(payload)]) == (True, True)
    for header, _ in every:
        entry = found(shared(engine), header)
        assert entry is not None and entry.header.tokens == header.tokens
    short = found(shared(engine), first, begin)  # of those of which only the beginning is asked for
    assert short is not None and short.header.tokens.startswith(begin)
    assert len({name for name in engine.values if "-exact-" in name and name.endswith(f"-{NUM_PLACES - 1}")}) == 1


def test_a_short_entry_that_finds_no_place_is_not_there() -> None:
    engine = Engine()
    header, payload = made(40, 1)
    begin = header.tokens[:PAGE]
    for seed in range(1, 1 + NUM_PLACES):
        one, data = made(40, seed)
        one = replace(one, tokens=begin + one.tokens[PAGE:])
        assert shared(engine).publish(one, [memoryview(data)]) == (True, True)
    one, data = made(40, 99)
    one = replace(one, tokens=begin + one.tokens[PAGE:])
    assert shared(engine).publish(one, [memoryview(data)]) == (False, False)


def test_what_another_key_has_sealed_or_none_is_a_miss() -> None:
    header, payload = made()
    for writer, reader in ((None, b"a"), (b"a", None), (b"a", b"b")):
        keys = [None if secret is None else Key(secret * 32) for secret in (writer, reader)]
        engine = Engine()
        assert shared(engine, keys[0]).publish(header, [memoryview(payload)])
        assert found(shared(engine, keys[1]), header) is None  # under names of its own


def test_a_store_that_is_full_takes_nothing_and_is_asked_later() -> None:
    header, payload = made(400)
    engine, now_s = Engine(room=1000), [0.0]
    circuit = Circuit("test", lambda: now_s[0])
    store = SharedEntries(engine, circuit)
    with pytest.raises(BadEntry, match="full"):
        store.publish(header, [memoryview(payload)])
    assert not circuit.may_write and circuit.may_read and circuit.errors["write_failed"] == 1
    now_s[0], engine.room = 1.5, 1 << 20
    assert circuit.may_write and store.publish(header, [memoryview(payload)]) == (True, True)
    assert circuit.may_write


def test_an_index_that_names_impossible_sizes_is_refused() -> None:
    import xxhash

    header, payload = made()
    engine = Engine()
    shared(engine).publish(header, [memoryview(payload)])
    name = next(name for name in engine.values if name.endswith("exact-0"))
    for place, size in (((12, 16), 0), ((12, 16), 2**31), ((24, 28), 0), ((16, 24), 2**60)):
        record = bytearray(engine.values[name][: INDEX_BYTES - 16])
        record[slice(*place)] = size.to_bytes(place[1] - place[0], "little")
        engine.values[name] = bytes(record) + xxhash.xxh3_128_digest(bytes(record))
        with pytest.raises(BadEntry, match="length"):
            found(shared(engine), header)
