"""Gain of lookups in an external store, which mostly may have nothing, against what they take."""

from __future__ import annotations

MEMORY = 0.9
"""How much of what is known each lookup leaves."""


class LookupGain:
    """Share of lookups that found something, and what they took; exponential means that begin with half of them."""

    def __init__(self) -> None:
        self.hit_share = 0.5
        self.seconds = 0.0

    def observe(self, seconds: float, *, is_hit: bool) -> None:
        self.hit_share += (1.0 - MEMORY) * (is_hit - self.hit_share)
        self.seconds = seconds if not self.seconds else MEMORY * self.seconds + (1.0 - MEMORY) * seconds

    def is_worth_waiting(self, saved_s: float) -> bool:
        """True if lookups that save ``saved_s`` seconds where they find something cost less than they save."""
        return self.hit_share * saved_s > self.seconds
