"""Codec lossless: every bit of what it stores comes back, and what it has no room for is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_evicpress.codec import DoesNotFitError, NotFiniteError, StoredFormError, get_codec
from sglang_evicpress.codec.layout import LosslessLayout, can_store, stored_bytes
from sglang_evicpress.codec.lossless import LosslessCodec

BLOCK = 32
CODEC = LosslessCodec()


ROWS: dict[str, Callable[[tuple[int, int]], torch.Tensor]] = {
    "normal": torch.randn,
    "outliers": lambda shape: torch.randn(shape) * torch.where(torch.arange(shape[1]) % 16 == 3, 50.0, 1.0),
    "constant": lambda shape: torch.full(shape, -3.3),
    "zeros of both signs": lambda shape: torch.zeros(shape) * torch.randn(shape).sign(),
    "half zeros": lambda shape: torch.randn(shape).relu(),
    "denormal": lambda shape: torch.randn(shape) * 1e-40,
    "least normal beside denormal": lambda shape: torch.randn(shape) * 2e-38,
    "greatest": lambda shape: torch.randn(shape).sign() * torch.finfo(torch.bfloat16).max,
    "at the ends of the codes": lambda shape: 2.0 ** -(torch.arange(shape[0] * shape[1]) % 14).float().view(shape),
    "rows of all sizes": lambda shape: torch.randn(shape) * 10.0 ** torch.linspace(-30, 30, shape[0])[:, None],
}


def rows_of(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    most = torch.finfo(torch.bfloat16).max
    keys, values = (ROWS[kind](shape).clamp(-most, most).bfloat16() for _ in "kv")
    return keys, values


def encoded(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    stored = torch.full((CODEC.num_bytes(*keys.shape, keys.dtype),), 0xAA, dtype=torch.uint8)
    CODEC.encode(keys, values, stored)
    return stored


def decoded(stored: torch.Tensor, like: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
    pair = [torch.full_like(like[begin:end], torch.nan) for _ in "kv"]
    CODEC.decode(stored, len(like), begin, *pair)
    return pair


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("shape", [(100, 64), (64, 8), (31, 40), (160, 1024)])
def test_every_bit_comes_back(kind: str, shape: tuple[int, int]) -> None:
    keys, values = rows_of(kind, shape)
    stored = encoded(keys, values)
    pair = decoded(stored, keys, 0, len(keys))
    assert is_same(pair[0], keys) and is_same(pair[1], values)
    assert torch.equal(encoded(*pair), stored)


def test_any_rows_come_back() -> None:
    keys, values = rows_of("outliers", (135, 64))
    stored = encoded(keys, values)
    edges = [0, 1, 31, 32, 63, 64, 70, 96, 127, 128, 134, 135]
    for begin in edges:
        for end in edges[edges.index(begin) :]:
            pair = decoded(stored, keys, begin, end)
            assert is_same(pair[0], keys[begin:end]) and is_same(pair[1], values[begin:end])


@pytest.mark.parametrize("at_once", [1, 1 << 13])
def test_rows_come_back_however_many_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    keys, values = rows_of("outliers", (300, 64))
    expected = encoded(keys, values)
    monkeypatch.setattr("sglang_evicpress.codec.lossless._CHUNK_VALUES", at_once)
    stored = encoded(keys, values)
    assert torch.equal(stored, expected)
    for begin, end in ((0, 300), (40, 290)):
        pair = decoded(stored, keys, begin, end)
        assert is_same(pair[0], keys[begin:end]) and is_same(pair[1], values[begin:end])


@pytest.mark.parametrize("which", [0, 1])
def test_a_block_has_room_for_an_escape_in_32_values(which: int) -> None:
    channels = 24
    pair = [torch.ones(3 * BLOCK + 5, channels).bfloat16() for _ in "kv"]
    block = pair[which][BLOCK : 2 * BLOCK].view(-1)
    block[torch.randperm(len(block), generator=torch.Generator().manual_seed(0))[:channels]] = 2.0**-14
    pair[which][3 * BLOCK :, 1:] = 2.0**-20  # raw rows need no room
    found = decoded(encoded(*pair), pair[0], 0, len(pair[0]))
    assert is_same(found[0], pair[0]) and is_same(found[1], pair[1])
    block[block == 1.0] = torch.where(torch.arange(int((block == 1.0).sum())) == 7, 2.0**-30, 1.0).bfloat16()
    with pytest.raises(DoesNotFitError, match="more than 24 exponents"):
        encoded(*pair)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [(0, 0), (40, 5), (99, 63)])
@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_are_not_finite_are_refused(bad: float, at: tuple[int, int], which: int) -> None:
    pair = rows_of("normal", (100, 64))
    pair[which][at] = bad
    with pytest.raises(NotFiniteError, match="NaN or Inf"):
        encoded(*pair)


def test_bytes_of_something_else_are_refused() -> None:
    keys, values = rows_of("normal", (100, 64))
    stored = encoded(keys, values)
    for like in (keys[:99], keys[:, :32]):
        with pytest.raises(StoredFormError):
            decoded(stored, like, 0, len(like))
    for at in (0, 1, 2, 4, 8, 12):
        damaged = stored.clone()
        damaged[at] += 1
        with pytest.raises(StoredFormError):
            decoded(damaged, keys, 0, 100)
    for end in (0, 7, 16, len(stored) - 1):
        with pytest.raises(StoredFormError):
            decoded(stored[:end], keys, 0, 100)


def test_bytes_that_nobody_wrote_are_rows_of_no_other_block() -> None:
    keys, values = rows_of("normal", (96, 64))
    stored = encoded(keys, values)
    layout = LosslessLayout(96, 64)
    begin = 16 + 2 * layout.block_bytes
    stored[begin : begin + 2 * layout.block_bytes] = 0xFF  # more escapes than there is room for
    pair = decoded(stored, keys, 0, 96)
    for found, rows in zip(pair, (keys, values), strict=True):
        assert is_same(found[:32], rows[:32]) and is_same(found[64:], rows[64:])


@pytest.mark.parametrize("num_slots", [0, 5, 64, 100])
def test_a_part_of_a_layer_is_a_layer_of_its_slots(num_slots: int) -> None:
    keys, values = rows_of("outliers", (num_slots, 64))
    stored, whole = encoded(keys, values), LosslessLayout(num_slots, 64)
    assert whole.part(0, num_slots) == (whole, [(16, whole.num_bytes)])
    ends = sorted({*range(0, num_slots, BLOCK), num_slots})
    for begin in range(0, num_slots, BLOCK):
        for end in ends[ends.index(begin) :]:
            part, ((first, last),) = whole.part(begin, end)
            assert part == LosslessLayout(end - begin, 64)
            assert torch.equal(stored[first:last], encoded(keys[begin:end], values[begin:end])[16:])
    for begin, end in ((1, num_slots), (0, num_slots - 1), (64, 32)):
        with pytest.raises(ValueError, match="whole blocks of 32"):
            whole.part(begin, end)


def test_bytes_and_dtypes() -> None:
    assert get_codec("lossless") is get_codec("lossless") and get_codec("lossless").name == "lossless"
    for num_slots in (1024, 1055, 4096):
        num_bytes = CODEC.num_bytes(num_slots, 1024, torch.bfloat16)
        assert num_bytes == stored_bytes("lossless", num_slots, 1024, 2) and 1.28 < 4096 * num_slots / num_bytes < 1.31
    assert can_store("lossless", 64, "bfloat16") and not can_store("lossless", 4, "bfloat16")
    for dtype in ("float16", "float32", "float8_e4m3fn"):
        assert not can_store("lossless", 64, dtype)
    with pytest.raises(ValueError, match=r"float16: expected torch\.bfloat16"):
        CODEC.num_bytes(100, 64, torch.float16)
