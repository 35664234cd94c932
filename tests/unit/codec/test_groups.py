"""int8, int4 and int2 against a float64 reference, on rows of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sglang_evicpress.codec import NotFiniteError, StoredFormError, get_codec
from sglang_evicpress.codec.groups import GroupCodec
from sglang_evicpress.codec.layout import GroupLayout, can_store, stored_bytes, stored_layout

NAMES = {8: "int8", 4: "int4", 2: "int2"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def outliers(shape: tuple[int, int]) -> torch.Tensor:
    rows = torch.randn(shape)
    rows[:, ::16] = rows[:, ::16] * 3 + 90
    return rows


def spread(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape) * 10.0 ** torch.randint(-7, 4, shape)


ROWS: dict[str, Callable[[tuple[int, int]], torch.Tensor]] = {
    "normal": torch.randn,
    "outliers": outliers,
    "constant": lambda shape: torch.full(shape, 3.3),
    "zeros of both signs": lambda shape: torch.zeros(shape) * torch.randn(shape).sign(),
    "denormal": lambda shape: torch.randn(shape) * 1e-40,
    "greatest": lambda shape: torch.randn(shape).sign() * 6.5e4,
    "beyond float32": lambda shape: torch.randn(shape).sign() * 3.38e38,
    "spread": spread,
    "close together": lambda shape: 100 + 0.3 * torch.randn(shape),
    "nearer than codes": lambda shape: 1 + torch.randint(0, 250, shape) * 2.0**-23,
    "as near as codes": lambda shape: torch.randint(0, 300, shape) * 2.0**-23 - 1,
    "around codes of 4 bits": lambda shape: 100 + 1e-4 * torch.randn(shape),
    "codes at half steps": lambda shape: 63.75 + 7.5 * torch.rand(shape),
}


def rows_of(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    most = torch.finfo(dtype).max
    keys, values = (ROWS[kind](shape).clamp(-most, most).to(dtype) for _ in range(2))
    return keys, values


def encoded(codec: GroupCodec, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    stored = torch.full((codec.num_bytes(*keys.shape, keys.dtype),), 0xAA, dtype=torch.uint8)
    codec.encode(keys, values, stored)
    return stored


def decoded(codec: GroupCodec, stored: torch.Tensor, like: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
    pair = [torch.full_like(like[begin:end], torch.nan) for _ in range(2)]
    codec.decode(stored, len(like), begin, *pair)
    return pair


def bounds(rows: torch.Tensor, found: torch.Tensor, group: tuple[int, int], bits: int) -> torch.Tensor:
    """How far every value of ``found`` may be from its own: half of what lies between two codes in its group, the
    rounding to the dtype, and that of the float32 in which codes are read."""
    tiles = rows.double().unfold(0, group[0], group[0]).unfold(1, group[1], group[1])
    least, greatest = tiles.amin((2, 3)), tiles.amax((2, 3))
    step = (greatest - least) / (2**bits - 1)
    arithmetic = torch.maximum(least.abs(), greatest.abs()) * 2.0**-22
    of_group = (step / 2 + arithmetic).repeat_interleave(group[0], 0).repeat_interleave(group[1], 1)
    info = torch.finfo(rows.dtype)
    size = torch.maximum(rows.double().abs(), found.double().abs())
    return of_group + size * info.eps / 2 + info.smallest_normal * info.eps


@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_back_is_within_half_a_step(dtype: torch.dtype, kind: str, bits: int) -> None:
    codec = GroupCodec(bits, window=3)
    keys, values = rows_of(kind, (104, 96), dtype)
    pair = decoded(codec, encoded(codec, keys, values), keys, 0, 104)
    for rows, found, group in ((keys, pair[0], (32, 1)), (values, pair[1], (1, 32))):
        num_quantised = 96 if rows is keys else 101
        assert torch.equal(found[num_quantised:], rows[num_quantised:])
        rows, found = rows[:num_quantised], found[:num_quantised]
        error = (found.double() - rows.double()).abs()
        assert (error <= bounds(rows, found, group, bits)).all()


@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_back_encodes_to_the_same_bytes(dtype: torch.dtype, kind: str, bits: int) -> None:
    for seed, (num_slots, channels, window) in enumerate([(100, 64, 0), (33, 8, 5), (31, 40, 0), (64, 512, 40)]):
        codec = GroupCodec(bits, window=window)
        keys, values = rows_of(kind, (num_slots, channels), dtype, seed)
        stored = encoded(codec, keys, values)
        assert torch.equal(encoded(codec, *decoded(codec, stored, keys, 0, num_slots)), stored)


@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize(("group", "window"), [(32, 0), (64, 0), (32, 20)])
def test_any_rows_come_back_as_they_do_with_all(bits: int, group: int, window: int) -> None:
    codec = GroupCodec(bits, group=group, window=window)
    keys, values = rows_of("outliers", (135, 64), torch.bfloat16)
    stored = encoded(codec, keys, values)
    whole = decoded(codec, stored, keys, 0, 135)
    edges = [0, 1, 31, 32, 63, 64, 70, 96, 115, 127, 128, 134, 135]
    for begin in edges:
        for end in edges[edges.index(begin) :]:
            pair = decoded(codec, stored, keys, begin, end)
            assert all(torch.equal(part, all_of[begin:end]) for part, all_of in zip(pair, whole, strict=True))


@pytest.mark.parametrize("at_once", [1, 1 << 13])
def test_rows_come_back_however_many_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    codec, (keys, values) = GroupCodec(4), rows_of("outliers", (300, 64), torch.bfloat16)
    expected = encoded(codec, keys, values)
    rows = decoded(codec, expected, keys, 40, 290)
    monkeypatch.setattr("sglang_evicpress.codec.groups._CHUNK_VALUES", at_once)
    stored = encoded(codec, keys, values)
    assert torch.equal(stored, expected)
    assert all(map(torch.equal, decoded(codec, stored, keys, 40, 290), rows))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.58), (4, 0.33), (2, 0.21)])
def test_bytes_of_long_nodes(bits: int, most: float) -> None:
    raw = 2 * 1024 * 2
    for num_slots in (1024, 1040, 1055, 4096):
        assert GroupCodec(bits).num_bytes(num_slots, 1024, torch.bfloat16) / (raw * num_slots) <= most


@pytest.mark.parametrize("bits", NAMES)
def test_error_is_that_of_an_affine_quantiser(bits: int) -> None:
    """torch's per-channel affine quantiser moves the zero point to a code, which costs it a little on average."""
    codec, levels = GroupCodec(bits), 2**bits - 1
    keys, values = rows_of("normal", (256, 64), torch.float32)
    found = decoded(codec, encoded(codec, keys, values), keys, 0, 256)[0]
    groups = keys.view(8, 32, 64).transpose(0, 1).reshape(32, -1)
    scale = (groups.amax(0) - groups.amin(0)) / levels
    zero = (-groups.amin(0) / scale).round().to(torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(groups, scale, zero, 1, 0, levels)
    ours = (found - keys).square().mean()
    assert 0.8 < ours / (theirs - groups).square().mean() <= 1.02


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [(0, 0), (40, 5), (99, 63)])
@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_are_not_finite_are_refused(bad: float, at: tuple[int, int], which: int) -> None:
    pair = rows_of("normal", (100, 64), torch.bfloat16)
    pair[which][at] = bad
    with pytest.raises(NotFiniteError, match="NaN or Inf"):
        encoded(GroupCodec(4, window=2), *pair)


def test_bytes_of_something_else_are_refused() -> None:
    codec = GroupCodec(4)
    keys, values = rows_of("normal", (100, 64), torch.bfloat16)
    stored = encoded(codec, keys, values)
    for other, like in ((GroupCodec(8), keys), (codec, keys[:99]), (codec, keys[:, :32]), (codec, keys.float())):
        with pytest.raises(StoredFormError):
            decoded(other, stored, like, 0, len(like))
    for at, value in ((0, 2), (1, 2), (2, 0), (2, 64), (4, 1)):
        damaged = stored.clone()
        damaged[at] = value
        with pytest.raises(StoredFormError):
            decoded(codec, damaged, keys, 0, 100)
    for end in (0, 7, 16, len(stored) - 1):
        with pytest.raises(StoredFormError):
            decoded(codec, stored[:end], keys, 0, 100)


def test_groups_of_other_size_are_read_as_they_were_written() -> None:
    keys, values = rows_of("normal", (150, 64), torch.bfloat16)
    writer = GroupCodec(4, group=64, window=10)
    stored = encoded(writer, keys, values)
    for begin, end in ((0, 150), (70, 149)):
        ours, theirs = (decoded(codec, stored, keys, begin, end) for codec in (GroupCodec(4), writer))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize(("num_slots", "window"), [(135, 0), (128, 0), (135, 20), (135, 7), (100, 200), (31, 0)])
def test_a_part_of_a_layer_is_a_layer_by_itself(bits: int, num_slots: int, window: int) -> None:
    keys, values = rows_of("outliers", (num_slots, 64), torch.bfloat16)
    stored = encoded(GroupCodec(bits, window=window), keys, values)
    whole = stored_layout(bytes(stored[:16].tolist()), len(stored), GroupLayout(bits, 32, window, num_slots, 64, 2))
    edges = [*range(0, num_slots, 32), num_slots]
    for begin in edges[:-1]:
        for end in edges[edges.index(begin) + 1 :]:
            part, spans = whole.part(begin, end)
            found = torch.cat([stored[at:to] for at, to in spans])
            expected = encoded(GroupCodec(bits, window=part.window), keys[begin:end], values[begin:end])
            assert len(expected) == part.num_bytes and torch.equal(found, expected[16:])
    assert whole.part(0, num_slots) == (
        whole if window <= num_slots else replace(whole, window=num_slots),
        [(16, len(stored))],
    )
    for begin, end in ((1, num_slots), (0, num_slots - 1), (64, 32)):
        with pytest.raises(ValueError, match="whole groups of 32"):
            whole.part(begin, end)


@pytest.mark.parametrize("name", NAMES.values())
def test_codecs_by_name(name: str) -> None:
    codec = get_codec(name)
    assert codec is not None and codec.name == name and codec is get_codec(name)
    assert stored_bytes(name, 100, 64, 2) == codec.num_bytes(100, 64, torch.bfloat16)
    assert can_store(name, 64, "bfloat16")
    assert not can_store(name, 64, "float8_e4m3fn") and not can_store(name, 4, "bfloat16")
    assert not can_store("int3", 64, "bfloat16")


def test_unknown_codecs_and_settings_are_refused() -> None:
    assert get_codec("raw") is None
    with pytest.raises(ValueError, match="codec 'int3' is not known: expected one of raw, lossless, int8, int4, int2"):
        get_codec("int3")
    for settings, accepted in (({"bits": 3}, "2, 4 or 8"), ({"bits": 4, "group": 12}, "multiple of 8"),
                               ({"bits": 4, "window": -1}, "0 to 2")):  # fmt: skip
        with pytest.raises(ValueError, match=accepted):
            GroupCodec(**settings)
