"""Values that no well-behaved client sends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

_TEXTS = (
    "",
    "\x00",
    "exact",
    "keydiff@0.5",
    "keydiff@1e309",
    "paged",
    "../../etc/passwd",
    "/dev/zero",
    "Ω" * 300,
    "true",
)
_NUMBERS = (0, 1, -1, 7, 2**31, 2**63 - 1, 2**64, 10**40, -(10**40), 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf)


def any_value(rng: random.Random) -> object:
    """Value of any JSON type, and NaN and infinities, which Python's JSON writes as such."""
    kinds: tuple[Callable[[], object], ...] = (
        lambda: rng.choice(_NUMBERS),
        lambda: rng.choice(_TEXTS),
        lambda: rng.choice((None, True, False)),
        lambda: [rng.choice(_NUMBERS) for _ in range(rng.randrange(40))],
        lambda: {rng.choice(_TEXTS): rng.choice(_NUMBERS) for _ in range(rng.randrange(5))},
        lambda: _nested(rng.randrange(2, 300)),
        lambda: "9" * rng.randrange(1, 5_000),
        lambda: rng.randrange(-10, 5_000),
    )
    return rng.choice(kinds)()


def any_text(rng: random.Random) -> str:
    """For a place in a URL."""
    return rng.choice((*_TEXTS, str(rng.randrange(2_000)), "-1", "1e9", "NaN", "9" * 200, "true", "host", "%00"))


def _nested(depth: int) -> object:
    value: object = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value
