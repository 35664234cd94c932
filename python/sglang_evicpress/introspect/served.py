"""Counts of what requests were served: cached tokens by the tier and form they were found in, and first tokens."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from statistics import fmean

from sglang_evicpress.quantiles import quantile

NUM_RECENT = 512
"""First tokens of which the times are kept, the last ones."""


class ServedTokens:
    """Prompt tokens that the cache served, by tier and form, and the seconds in which they would have been computed."""

    def __init__(self) -> None:
        self._tokens: dict[str, Counter[str]] = {}
        self._saved_s = defaultdict[str, float](float)

    def add(self, tier: str, form: str, num_tokens: int, saved_s: float) -> None:
        """A request runs on ``num_tokens`` found on ``tier`` in ``form``; computing them was predicted to take
        ``saved_s`` seconds."""
        self._tokens.setdefault(tier, Counter())[form] += num_tokens
        self._saved_s[tier] += saved_s

    def describe(self) -> dict[str, object]:
        """The counts as JSON: ``tokens`` by tier and form, ``saved_s`` by tier."""
        tokens = {tier: dict(forms) for tier, forms in sorted(self._tokens.items())}
        return {"tokens": tokens, "saved_s": dict(self._saved_s)}


class FirstTokenTimes:
    """Seconds from the queue to the first token, of the last ``NUM_RECENT`` requests."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, seconds: float) -> None:
        """A request has its first token."""
        self.num_seen += 1
        self._recent.append(seconds)

    def describe(self) -> dict[str, object]:
        """Mean, median and 95th percentile of the recent ones in seconds, None before any."""
        recent = list(self._recent)
        return {
            "num_seen": self.num_seen,
            "num_recent": len(recent),
            "mean_s": fmean(recent) if recent else None,
            "p50_s": quantile(recent, 0.5) if recent else None,
            "p95_s": quantile(recent, 0.95) if recent else None,
        }
