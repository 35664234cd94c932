"""Seeded damage to bytes: what disks, editors and strangers do to a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"1" * 400, b'"', b"\\ud800", b"\\u0000"),
    *(b"[" * 3000, b"{" * 200, b"{}", b"[]", b",", b":", b"\xff\xfe", b"\x00", b"[0]", b'"exact"', b"0.0000001"),
)


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """``data`` after one to four damages; parts of ``others`` may be in it."""
    spoiled = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_DAMAGES)(rng, spoiled, others)
    return bytes(spoiled)


def _flip(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    for _ in range(min(len(data), rng.choice((1, 1, 1, 8)))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    size, at = rng.choice((1, 2, 4, 8)), rng.randrange(len(data) + 1)
    data[at : at + size] = (rng.choice(_NUMBERS) % 256**size).to_bytes(size, "little")


def _cut(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _drop(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 4, 64))]


def _double(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.choice((1, 4, 64, 4096))]


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others) if others else rng.randbytes(32)
    begin, at = rng.randrange(len(other) + 1), rng.randrange(len(data) + 1)
    part = other[begin : begin + rng.choice((4, 16, 128, 4096))]
    data[at : at + len(part)] = part


def _word(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.choice((0, 1, 4))] = rng.choice(_WORDS)


def _zero(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((16, 512, 4096)))
    data[at:end] = bytes(end - at)


_DAMAGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_flip, _flip, _set, _cut, _drop, _double, _splice, _word, _zero),
)
