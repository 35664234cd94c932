"""Waiting of requests for each tier's link and for the GPUs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from sglang_evicpress.core import Tier

NO_QUEUE = math.inf
MOST_CONGESTION = 8.0
"""How many times a second of computing counts at most when others wait for it, as on a server."""


class Queue:
    """Each tier's link and the GPUs serve one request after the other, in order of arrival.

    Loading overlaps with the prefill of others; ``num_servers`` machines drain a queue that many times as fast. With
    ``NO_QUEUE`` nobody waits.
    """

    def __init__(self, num_servers: float, tiers: Iterable[Tier]) -> None:
        self.num_servers = num_servers
        self._free_at = dict.fromkeys((Tier.GPU, *tiers), 0.0)
        self._turns: deque[float] = deque()  # of those that have not had it, in order

    def wait_s(self, tier: Tier, now_s: float) -> float:
        """Seconds until a tier's link, or on the GPU a server, has done what it was asked for already."""
        return max(0.0, self._free_at[tier] - now_s)

    def congestion(self, now_s: float) -> float:
        """Factor by which a second of computing counts for whoever arrives now: about as many will wait behind it as
        wait now before it."""
        while self._turns and self._turns[0] <= now_s:
            self._turns.popleft()
        return min(MOST_CONGESTION, 1.0 + len(self._turns) / self.num_servers)

    def serve(self, now_s: float, loads: Mapping[Tier, float], prefill_s: float) -> float:
        """Seconds to the first token of a request that arrives now, with seconds of loading by tier, and of prefill."""
        if self.num_servers == NO_QUEUE:
            return sum(loads.values()) + prefill_s
        ready = now_s
        for tier, seconds in loads.items():
            begin = max(now_s, self._free_at[tier])
            self._free_at[tier] = begin + seconds / self.num_servers
            ready = max(ready, begin + seconds)
        turn = max(now_s, self._free_at[Tier.GPU])
        self._turns.append(turn)
        self._free_at[Tier.GPU] = turn + prefill_s / self.num_servers
        return max(ready, turn) + prefill_s - now_s
