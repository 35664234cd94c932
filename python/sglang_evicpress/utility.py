"""Utility of one option of one node: quality bought, delay paid, times how often. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Prefill time of n tokens: fixed_s + per_token_s * n + per_token_depth_s * n * (depth + n / 2) seconds.

    ``fixed_s`` (seconds) is what any prefill costs, ``per_token_s`` (seconds per token) the part linear in
    length, ``per_token_depth_s`` (seconds per pair of tokens) that of attention: ``depth`` tokens come before
    the n, so that a new token looks at depth + n / 2 on average. Raises ValueError if one is negative or not
    finite.
    """

    fixed_s: float
    per_token_s: float
    per_token_depth_s: float

    def __post_init__(self) -> None:
        parts = {
            "fixed_s": self.fixed_s,
            "per_token_s": self.per_token_s,
            "per_token_depth_s": self.per_token_depth_s,
        }
        for name, seconds in parts.items():
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"prefill cost {name} is {seconds!r}: expected finite seconds, 0 or more")


def recompute_seconds(num_tokens: int, depth_tokens: int, model: PrefillCost) -> float:
    """Delay of a dropped node: seconds to prefill ``num_tokens`` behind a path of ``depth_tokens``."""
    pairs = num_tokens * (depth_tokens + num_tokens / 2)
    return model.fixed_s + model.per_token_s * num_tokens + model.per_token_depth_s * pairs


def utility(weight: float, alpha: float, quality: float, delay_s: float) -> float:
    """weight * (alpha * quality - delay_s), in weighted seconds.

    EvicPress section 4.2: alpha times quality minus time to first token, times how often the context is used;
    alpha is the seconds a user would wait for full quality. ``weight`` is the expected reuse. The delay is
    that of getting the KV back to the GPU: 0 for a form kept there, ``recompute_seconds`` for a dropped node,
    which then has quality 1 (recomputed KV is exact) and occupies nothing.
    """
    return weight * (alpha * quality - delay_s)
