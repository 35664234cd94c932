"""A record says the same after a round trip, and no other bytes pass for one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from struct import calcsize, pack, pack_into, unpack_from

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, PRESSES, Form
from sglang_evicpress.tiers.entry.encoding import (
    MAGIC,
    MAX_RECORD_BYTES,
    Peek,
    Tombstone,
    decode,
    encode,
    encode_tombstone,
    peek,
)
from sglang_evicpress.tiers.entry.header import (
    ITEM_BYTES,
    REASONS,
    BadEntry,
    Extent,
    Header,
    Shape,
    check_extent,
    check_identity,
    extent_of,
    problem_of,
)
from sglang_evicpress.tiers.entry.identity import FORMAT_VERSION, lookup_key_of, token_bytes

DIGEST = bytes(range(100, 116))
# Byte offsets and formats of the fixed fields of format 3.
FIELDS = {
    "kind": (10, "<H"),
    "length": (12, "<I"),
    "lookup_key": (80, "<Q"),
    "start": (88, "<Q"),
    "payload_offset": (96, "<Q"),
    "payload_bytes": (104, "<Q"),
    "num_tokens": (112, "<I"),
    "num_slots": (116, "<I"),
    "num_extents": (120, "<I"),
    "num_layers": (124, "<I"),
    "num_heads": (128, "<I"),
    "head_dim": (132, "<I"),
    "page_size": (136, "<I"),
    "dtype_bytes": (140, "<B"),
    "form_bytes": (141, "<B"),
    "flags": (142, "<H"),
}
EXTENTS_AT = 144


def make_header(
    form: Form = EXACT,
    shape: Shape = Shape(2, 2, 4, "bfloat16", 1),  # noqa: B008 - it is frozen
    tokens: tuple[int, ...] = (7, 0, 2**32 - 1),
    num_slots: int | None = None,
    *,
    digests: Callable[[], bytes] = lambda: DIGEST,
    start: int = 0,
    is_lossy_prefix: bool = False,
    payload_offset: int = 4096,
    layer_slots: tuple[int, ...] = (),
) -> Header:
    """A header whose extents fit its form."""
    num_slots = len(tokens) if num_slots is None else num_slots
    extents: list[Extent] = []
    end = 0
    for layer in range(shape.num_layers + (form.press is not None)):
        counts = layer_slots or (num_slots,) * shape.num_layers
        if layer == shape.num_layers:
            num_bytes = 4 * (shape.num_heads * sum(counts) + num_slots)
            num_bytes += shape.num_layers * -(-num_slots // 8) if layer_slots else 0
        elif form.codec == "raw":
            num_bytes = 2 * counts[layer] * shape.num_heads * shape.head_dim * ITEM_BYTES[shape.dtype]
        else:
            num_bytes = shape.stored_bytes(counts[layer], form.codec)
        extents.append(Extent(end, num_bytes, digests()))
        end += num_bytes
    return Header(
        *(bytes([number] * 16) for number in range(1, 5)),
        start,
        token_bytes(tokens),
        form,
        is_lossy_prefix,
        num_slots,
        shape,
        tuple(extents),
        payload_offset,
        layer_slots=layer_slots,
    )


EXACT_HEADER = make_header()
LOSSY_HEADER = make_header(Form("keydiff", 0.4), num_slots=2, start=11, is_lossy_prefix=True)
CODEC_HEADER = make_header(Form("knorm", 0.25, "int8"), num_slots=1)
UNEVEN_FORM = Form("snapkv", 0.5, "int4", "found-0a1b2c3d")
UNEVEN_HEADER = make_header(UNEVEN_FORM, num_slots=2, layer_slots=(0, 2), is_lossy_prefix=True)
SAMPLES = [EXACT_HEADER, LOSSY_HEADER, CODEC_HEADER, UNEVEN_HEADER]


@st.composite
def forms(draw: st.DrawFn) -> Form:
    codec = draw(st.sampled_from(["raw", "int8", "int4", "int2"]))
    if draw(st.booleans()):
        return Form(codec=codec)
    kept = st.floats(0, 1, exclude_min=True, exclude_max=True) | st.sampled_from([0.1, 0.25, 0.4, 0.5])
    budget = draw(st.sampled_from(["uniform", "pyramid", "found-0a1b2c3d"]))
    return Form(draw(st.sampled_from(sorted(PRESSES))), draw(kept), codec, budget)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    page = draw(st.sampled_from([1, 1, 2, 16]))
    shape = Shape(
        draw(st.integers(1, 40)),
        draw(st.integers(1, 2**16)),
        draw(st.integers(1, 2**16)),
        draw(st.sampled_from(sorted(ITEM_BYTES))),
        page,
    )
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=page, max_size=80))
    tokens = tokens[: len(tokens) // page * page]
    form = draw(forms())
    if form.codec != "raw":
        heads, dtype = 8 * draw(st.integers(1, 2**12)), draw(st.sampled_from(["bfloat16", "float16", "float32"]))
        shape = replace(shape, num_heads=heads, dtype=dtype)
    num_slots = len(tokens) if form.press is None else page * draw(st.integers(0, len(tokens) // page))
    layer_slots: tuple[int, ...] = ()
    if form.is_uneven and num_slots:
        counts = st.integers(0, num_slots // page).map(lambda pages: page * pages)
        drawn = draw(st.lists(counts, min_size=shape.num_layers, max_size=shape.num_layers))
        layer_slots = tuple(drawn) if min(drawn) < num_slots else ()
    header = make_header(
        form,
        shape,
        tuple(tokens),
        num_slots,
        layer_slots=layer_slots,
        digests=lambda: draw(st.binary(min_size=16, max_size=16)),
        start=page * draw(st.integers(0, (2**31 - 1 - len(tokens)) // page)),
        is_lossy_prefix=draw(st.booleans()),
    )
    keys = draw(st.lists(st.binary(min_size=16, max_size=16), min_size=4, max_size=4))
    offset = draw(st.integers(0, 2**63 - 1 - header.payload_bytes))
    header = replace(header, fingerprint=keys[0], namespace=keys[1], parent_key=keys[2], key=keys[3])
    return replace(header, payload_offset=offset)


def sealed(record: bytearray) -> bytes:
    """The record with the checksum that fits what it says."""
    record[-16:] = xxhash.xxh3_128_digest(bytes(record[:-16]))
    return bytes(record)


def patched(record: bytes, name: str, value: int) -> bytes:
    """The record with one field changed and a checksum that fits."""
    changed = bytearray(record)
    at, kind = FIELDS[name]
    pack_into(kind, changed, at, value)
    return sealed(changed)


def with_extents(header: Header, extents: list[Extent]) -> bytes:
    """The header's record with another table of as many extents, and all that is said of it made to fit."""
    record = bytearray(encode(header))
    for number, extent in enumerate(extents):
        pack_into("<QQ16s", record, EXTENTS_AT + 32 * number, extent.offset, extent.num_bytes, extent.digest)
    pack_into("<Q", record, FIELDS["payload_bytes"][0], (extents[-1].offset + extents[-1].num_bytes) % 2**64)
    return sealed(record)


def with_texts(header: Header, dtype: bytes, form: bytes) -> bytes:
    """The header's record with other words for its dtype and form."""
    record = encode(header)
    old_dtype, old_form = record[140], record[141]
    body = bytearray(record[: len(record) - 16 - old_dtype - old_form] + dtype + form + bytes(16))
    pack_into("<I", body, 12, len(body))
    pack_into("<BB", body, 140, len(dtype), len(form))
    return sealed(body)


def reason_of(read: Callable[..., object], record: bytes | bytearray) -> str:
    with pytest.raises(BadEntry) as caught:
        read(record)
    return caught.value.reason


@given(headers(), st.binary(max_size=70), st.binary(max_size=20))
def test_what_is_written_is_read(header: Header, before: bytes, behind: bytes) -> None:
    record = encode(header)
    end = len(before) + len(record)
    for buffer in (before + record + behind, memoryview(bytearray(before + record + behind))):
        assert decode(buffer, len(before)) == (header, end)
        assert peek(buffer, len(before)) == Peek(
            header.fingerprint,
            header.lookup_key,
            header.num_tokens,
            header.payload_offset,
            header.payload_bytes,
            len(record),
            header.key,
        )


def test_what_follows_from_the_fields() -> None:
    header = make_header(Form("knorm", 0.5), Shape(3, 2, 8, "float16", 2), (5, 6, 7, 8), 2)
    layer, survivors = 2 * 2 * 2 * 8 * 2, (3 * 2 * 2 + 2) * 4
    assert (header.shape.layer_bytes(2), header.shape.survivors_bytes(2)) == (layer, survivors)
    assert (header.num_tokens, header.payload_bytes) == (4, 3 * layer + survivors)
    assert header.lookup_key == lookup_key_of(header.parent_key, [5, 6])
    assert decode(encode(header))[0] == header


def test_dtypes_are_as_wide_as_torch_has_them() -> None:
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


@pytest.mark.parametrize("kept", [0.4, 0.1234567890123, 5e-324, 1 - 2**-53])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_form_keeps_every_digit(kept: float, codec: str) -> None:
    header = make_header(Form("snapkv", kept, codec))
    assert decode(encode(header))[0].form == header.form


def test_records_of_format_3_do_not_change() -> None:
    """They are on users' disks: whoever changes them raises FORMAT_VERSION."""
    assert FORMAT_VERSION == 3
    records = [*map(encode, SAMPLES), encode_tombstone(2**40)]
    assert records[0][:16] == MAGIC + pack("<HHI", 3, 1, len(records[0]))
    assert sha256(b"".join(records)).hexdigest() == "4364b727ba249c26ec8ecb868086f50811d7c41cb9a546574a0c54f77aa8f9a7"


@pytest.mark.parametrize("read", [decode, peek])
@given(st.binary(max_size=400), st.integers(-3, 500))
def test_random_bytes_are_no_record(read: Callable[..., object], noise: bytes, offset: int) -> None:
    assert reason_of(lambda data: read(data, offset), noise) in ("magic", "length")


@given(st.sampled_from([0, 1, 2, 3, 65535]), st.integers(0, 420), st.binary(min_size=384, max_size=384))
def test_random_bytes_behind_a_true_beginning_are_no_record(kind: int, length: int, noise: bytes) -> None:
    record = bytearray((MAGIC + pack("<HHI", FORMAT_VERSION, kind, length) + noise)[: max(length, 32)])
    assert reason_of(decode, record) in ("length", "header")
    assert reason_of(peek, record) in ("length", "header")
    assert reason_of(decode, sealed(record)) in ("length", "header")


@pytest.mark.parametrize(
    ("layer_slots", "problem"),
    [
        ((2, 2), "expected whole pages, and one layer with fewer"),
        ((3, 2), "expected 2 numbers from 0 to 2"),
        ((2,), "expected 2 numbers from 0 to 2"),
        ((2, 1, 2), "expected 2 numbers from 0 to 2"),
    ],
)
def test_slots_by_layer_that_cannot_be_are_refused(layer_slots: tuple[int, ...], problem: str) -> None:
    assert problem in str(problem_of(replace(UNEVEN_HEADER, layer_slots=layer_slots)))


def test_only_a_press_leaves_layers_different_slots() -> None:
    assert "form exact has all tokens" in str(problem_of(replace(EXACT_HEADER, layer_slots=(3, 1))))


def test_layers_with_different_slots_are_whole_pages() -> None:
    shape = Shape(2, 2, 4, "bfloat16", 4)
    header = make_header(Form("knorm", 0.5, budget="pyramid"), shape, tuple(range(16)), 8, layer_slots=(8, 4))
    assert problem_of(header) is None
    assert "whole pages" in str(problem_of(replace(header, layer_slots=(8, 3))))


@pytest.mark.parametrize("read", [decode, peek])
@pytest.mark.parametrize(
    "record",
    [encode(LOSSY_HEADER), encode(UNEVEN_HEADER), encode_tombstone(77)],
    ids=["entry", "uneven entry", "tombstone"],
)
def test_every_flipped_bit_is_seen(read: Callable[..., object], record: bytes) -> None:
    for bit in range(8 * len(record)):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        expected = ("magic",) * 8 + ("version",) * 2 + ("header",) * 2 + ("length/header",) * 4
        assert reason_of(read, bytes(flipped)) in (expected[bit // 8] if bit < 128 else "header").split("/")


@pytest.mark.parametrize("read", [decode, peek])
def test_every_truncation_is_seen(read: Callable[..., object]) -> None:
    record = encode(LOSSY_HEADER)
    assert {reason_of(read, record[:size]) for size in range(len(record))} == {"length"}


@pytest.mark.parametrize("read", [decode, peek])
@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 65535])
def test_another_version_is_told_apart_whatever_its_checksum(read: Callable[..., object], version: int) -> None:
    record = bytearray(encode(EXACT_HEADER))
    pack_into("<H", record, 8, version)
    assert reason_of(read, bytes(record)) == "version"
    assert reason_of(read, sealed(record)) == "version"


def test_a_length_that_was_changed_along_with_the_checksum_is_seen() -> None:
    record = encode(LOSSY_HEADER)
    for length in range(len(record) + 64):
        changed = bytearray((record + bytes(64))[: max(length, 32)])
        pack_into("<I", changed, 12, length)
        if length != len(record):
            assert reason_of(decode, sealed(changed)) == ("header" if length >= 32 else "length")


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_a_scan_sees_no_record_that_is_too_short_or_too_long_for_its_kind(kind: int) -> None:
    tombstone, shortest = len(encode_tombstone(0)), EXTENTS_AT + 16
    for length in range(32, shortest + 2):
        record = sealed(bytearray(MAGIC + pack("<HHI", FORMAT_VERSION, kind, length) + bytes(length - 16)))
        if (kind == 1 and length >= shortest) or (kind == 2 and length == tombstone):
            assert peek(record).record_bytes == length
        else:
            assert reason_of(peek, record) == "header"


@pytest.mark.parametrize("read", [decode, peek])
def test_no_record_begins_outside_the_buffer(read: Callable[..., object]) -> None:
    record = encode(EXACT_HEADER)
    for offset in (-1, -len(record), -len(record) - 1, 2 * len(record), 2**70):
        assert reason_of(lambda data, offset=offset: read(data, offset), record * 2) == "length"


@settings(max_examples=400)
@given(st.sampled_from(SAMPLES), st.data())
def test_a_sealed_lie_is_refused_or_is_the_one_record_of_its_header(header: Header, data: st.DataObject) -> None:
    record = bytearray(encode(header))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([*FIELDS, "any byte"]))
        at, kind = FIELDS.get(name, (data.draw(st.integers(16, len(record) - 17)), "<B"))
        top = 2 ** (8 * calcsize(kind)) - 1
        (old,) = unpack_from(kind, record, at)
        near = st.sampled_from([0, 1, 2, old + 1, old - 1, old * 2, top // 2, top // 2 + 1, top - 1, top])
        pack_into(kind, record, at, max(0, min(top, data.draw(near | st.integers(0, top)))))
    lie = sealed(record)
    try:
        read, end = decode(lie)
    except BadEntry as error:
        assert error.reason in ("header", "length")
    else:
        assert (encode(read), end) == (lie, len(lie))
    try:
        seen = peek(lie)
    except BadEntry as error:
        assert error.reason in ("header", "length")
    else:
        assert isinstance(seen, Tombstone) or (0 <= seen.lookup_key < 2**63 and seen.payload_offset < 2**63)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", 3),
        ("kind", 2),
        ("lookup_key", 5),
        ("lookup_key", 2**64 - 1),
        ("start", 2**31),
        ("start", 2**31 - 3),
        ("start", 2**64 - 1),
        ("payload_offset", 2**63 - 1),
        ("payload_offset", 2**64 - 1),
        ("payload_bytes", 0),
        ("payload_bytes", 2**64 - 1),
        ("num_tokens", 0),
        ("num_tokens", 2**32 - 1),
        ("num_slots", 0),
        ("num_slots", 4),
        ("num_slots", 2**32 - 1),
        ("num_extents", 0),
        ("num_extents", 2**32 - 1),
        ("num_layers", 0),
        ("num_layers", 1),
        ("num_layers", 3),
        ("num_heads", 0),
        ("num_heads", 2**32 - 1),
        ("head_dim", 0),
        ("head_dim", 8),
        ("page_size", 0),
        ("page_size", 2),
        ("dtype_bytes", 7),
        ("form_bytes", 255),
        ("flags", 2),
    ],
)
def test_a_field_that_cannot_be_is_refused(name: str, value: int) -> None:
    assert reason_of(decode, patched(encode(EXACT_HEADER), name, value)) == "header"


@pytest.mark.parametrize(
    ("name", "value"), [("lookup_key", 2**63), ("payload_offset", 2**63 - 1), ("payload_bytes", 2**64 - 1)]
)
def test_a_scan_sees_no_number_above_63_bits(name: str, value: int) -> None:
    assert reason_of(peek, patched(encode(EXACT_HEADER), name, value)) == "header"


@pytest.mark.parametrize("header", SAMPLES, ids=["exact", "lossy", "codec", "uneven"])
def test_extents_must_follow_one_another(header: Header) -> None:
    first, second, *rest = header.extents
    size = first.num_bytes
    assert decode(with_extents(header, list(header.extents))) == decode(encode(header))
    tables = {
        "a gap": [first, second._replace(offset=size + 1), *rest],
        "an overlap": [first, second._replace(offset=size - 1), *rest],
        "the same twice": [first, first, *rest],
        "another order": [second, first, *rest],
        "not at the beginning": [first._replace(offset=1), second, *rest],
        "beyond the payload": [first, second._replace(offset=2**63), *rest],
        "too long": [first, second._replace(num_bytes=2**64 - 1), *rest],
        "overflow": [first, second._replace(offset=2**64 - 1, num_bytes=2**64 - 1), *rest],
    }
    if header.form.codec == "raw":
        tables["shorter than its rows"] = [first._replace(num_bytes=size - 1), second._replace(offset=size - 1), *rest]
    if rest:
        tables["survivors cut"] = [first, second, rest[0]._replace(num_bytes=rest[0].num_bytes - 4)]
    reasons = {name: reason_of(decode, with_extents(header, table)) for name, table in tables.items()}
    assert set(reasons.values()) == {"header"}, reasons


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (b"bfloat17", b"exact"),
        (b"", b"exact"),
        (b"torch.bfloat16", b"exact"),
        (b"bfloat16\0", b"exact"),
        (b"bfloat1\xff", b"exact"),
        (b"bfloat16", b""),
        (b"bfloat16", b"exakt"),
        (b"bfloat16", b"exact "),
        (b"bfloat16", b"exact+raw"),
        (b"bfloat16", b"exact+"),
        (b"bfloat16", b"exact+int 8"),
        (b"bfloat16", b"exact+int8+int8"),
        (b"bfloat16", b"exact+" + b"a" * 33),
        (b"bfloat16", b"\xe9xact"),
        (b"bfloat16", b"keydiff"),
        (b"bfloat16", b"keydiff@"),
        (b"bfloat16", b"keydiff@nan"),
        (b"bfloat16", b"keydiff@0"),
        (b"bfloat16", b"keydiff@1.0"),
        (b"bfloat16", b"keydiff@0.40"),
        (b"bfloat16", b"nopress@0.4"),
    ],
)
@pytest.mark.parametrize("header", [EXACT_HEADER, LOSSY_HEADER], ids=["exact", "lossy"])
def test_a_word_that_is_not_known_is_refused(header: Header, dtype: bytes, form: bytes) -> None:
    assert decode(with_texts(header, b"bfloat16", str(header.form).encode()))[0] == header
    assert reason_of(decode, with_texts(header, dtype, form)) == "header"


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": b"short"},
        {"namespace": b""},
        {"parent_key": bytes(17)},
        {"key": bytes(15)},
        {"start": -1},
        {"start": 2**31},
        {"tokens": b""},
        {"tokens": bytes(13)},
        {"form": Form("nopress", 0.5)},
        {"form": Form("keydiff", 1.0)},
        {"form": Form("keydiff", float("nan"))},
        {"form": Form(None, 0.5)},
        {"form": Form(codec="")},
        {"form": Form(codec="é")},
        {"form": Form("keydiff", 0.4)},
        {"num_slots": -1},
        {"num_slots": 2},
        {"shape": Shape(2, 2, 4, "bfloat17", 1)},
        {"shape": Shape(2, 2, 4, "float32", 1)},
        {"shape": Shape(2, 2, 4, "bfloat16", 2)},
        {"shape": Shape(2, 2, 0, "bfloat16", 1)},
        {"shape": Shape(2, 2**32, 4, "bfloat16", 1)},
        {"extents": ()},
        {"extents": EXACT_HEADER.extents[:1]},
        {"extents": EXACT_HEADER.extents[::-1]},
        {"payload_offset": -1},
        {"payload_offset": 2**63 - 1},
    ],
    ids=str,
)
def test_what_could_not_be_read_is_not_written(change: dict[str, object]) -> None:
    encode(EXACT_HEADER)
    with pytest.raises(ValueError, match="header cannot be written"):
        encode(replace(EXACT_HEADER, **change))


@pytest.mark.parametrize(
    "header",
    [
        make_header(EXACT, num_slots=2),
        make_header(Form(codec="int8"), num_slots=2),
        make_header(Form("knorm", 0.5), num_slots=4),
        make_header(Form(codec="int8"), Shape(2, 2, 2**32, "bfloat16", 1)),
    ],
)
def test_extents_that_fit_do_not_excuse_the_rest(header: Header) -> None:
    with pytest.raises(ValueError, match="header cannot be written"):
        encode(header)


def test_pages_are_whole() -> None:
    paged = make_header(Form("knorm", 0.5), Shape(1, 1, 1, "uint8", 4), tuple(range(8)), 4, start=4)
    assert decode(encode(paged))[0] == paged
    for change in ({"start": 2}, {"tokens": paged.tokens[:-4]}):
        with pytest.raises(ValueError, match="whole pages of 4"):
            encode(replace(paged, **change))
    with pytest.raises(ValueError, match="whole pages of 4"):
        encode(make_header(paged.form, paged.shape, tuple(range(8)), 3))


def test_no_record_is_longer_than_the_limit() -> None:
    with pytest.raises(ValueError, match="expected at most 67108864"):
        encode(replace(make_header(Form("knorm", 0.5), num_slots=0), tokens=bytes(MAX_RECORD_BYTES)))
    memory = bytearray(MAX_RECORD_BYTES + 4096)
    for length, reason in ((MAX_RECORD_BYTES, "header"), (MAX_RECORD_BYTES + 1, "length")):
        memory[:16] = MAGIC + pack("<HHI", FORMAT_VERSION, 1, length)
        assert (reason_of(decode, memory), reason_of(peek, memory)) == (reason, reason)


@given(st.integers(0, 2**63 - 1))
@example(0)
@example(2**63 - 1)
def test_a_tombstone_is_told_apart(number: int) -> None:
    record = encode_tombstone(number)
    assert peek(record) == Tombstone(number, len(record))
    assert isinstance(peek(record), Tombstone)
    assert reason_of(decode, record) == "header"


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_tombstone_names_a_byte_of_a_file(number: int) -> None:
    with pytest.raises(ValueError, match=f"tombstone for byte {number}: expected 0 to"):
        encode_tombstone(number)
    if number > 0:
        record = bytearray(encode_tombstone(0))
        pack_into("<Q", record, 16, number)
        assert reason_of(peek, sealed(record)) == "header"


def test_a_file_of_records_is_scanned_to_its_torn_tail() -> None:
    rng = random.Random(1)
    records = [encode(rng.choice(SAMPLES)) if rng.random() < 0.7 else encode_tombstone(i) for i in range(50)]
    data = b"".join(records) + records[0][:-1]
    sizes, offset = [], 0
    while offset < len(data) - len(records[0]) + 1:
        seen = peek(data, offset)
        sizes.append(seen.record_bytes)
        offset += seen.record_bytes
    assert sizes == [len(record) for record in records]
    assert reason_of(lambda rest: peek(rest, offset), data) == "length"


def test_any_layout_of_the_buffer_is_read_as_bytes() -> None:
    record = encode(EXACT_HEADER)
    padded = np.frombuffer(record + bytes(-len(record) % 8), np.int64)
    for view in (memoryview(record).cast("b"), memoryview(padded)):
        assert decode(view) == (EXACT_HEADER, len(record))


def test_identity_is_checked_part_by_part() -> None:
    names = ("fingerprint", "namespace", "parent_key", "key")
    right = {name: getattr(LOSSY_HEADER, name) for name in names}
    check_identity(LOSSY_HEADER, **right)
    check_identity(LOSSY_HEADER, **{**right, "key": None})
    for name, reason in zip(names, ("fingerprint", "namespace", "identity", "identity"), strict=True):
        wrong = {**right, name: bytes(16)}
        assert reason_of(lambda _, wrong=wrong: check_identity(LOSSY_HEADER, **wrong), b"") == reason


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=5))
def test_an_extent_is_checked_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    extent = Extent(8, len(data), xxhash.xxh3_128_digest(data))
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [memoryview(bytearray(data))[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert extent_of(8, iter(chunks)) == extent
    check_extent(extent, iter(chunks))
    lies = [[*chunks, b"\0"], [b"\0", *chunks]]
    if data:
        flipped = bytearray(data)
        flipped[cuts[0] % len(data) if cuts else -1] ^= 16
        lies += [[data[:-1]], [data[1:]], [], [flipped]]
    for lie in lies:
        assert reason_of(lambda _, lie=lie: check_extent(extent, lie), b"") == "checksum"


def test_the_size_of_an_extent_is_counted_in_bytes() -> None:
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    extent = extent_of(0, [memoryview(rows)])
    assert extent == Extent(0, 48, xxhash.xxh3_128_digest(rows.tobytes()))
    assert reason_of(lambda _: check_extent(extent._replace(num_bytes=12), [memoryview(rows)]), b"") == "checksum"


def test_a_bad_entry_names_a_known_reason() -> None:
    assert [BadEntry(reason).reason for reason in REASONS] == list(REASONS)
    assert str(BadEntry("io", "disk gone")) == "io: disk gone"
    with pytest.raises(ValueError, match="reason 'odd' is not known: expected one of magic, version"):
        BadEntry("odd")
