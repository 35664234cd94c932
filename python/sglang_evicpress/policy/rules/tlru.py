"""Least recently used, but first what a conversation can do without and still answer in time."""

from __future__ import annotations

from sglang_evicpress.policy.base import DROPPED, Candidate
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.lru import CascadePolicy


class TlruPolicy(CascadePolicy):
    """Tail-optimized LRU (Zhang et al., arXiv 2510.15152; SGLang's ``tlru``, sglang pull request 34012).

    A conversation of ``history`` tokens whose next prompt adds ``prompt_tokens`` prefills at most ``threshold_tokens``
    as long as the first ``history + prompt_tokens - threshold_tokens`` are held. A node that starts behind those is
    safe to lose: such nodes go first, the others after them, each by last use. As in SGLang, ``history`` is the
    deepest end ever seen below the node, so that a trimmed conversation is not trimmed again. Raises ValueError for a
    negative number.

    Simplified: one threshold and one estimate for all requests, and a node that was moved down still counts as
    lost. SGLang's own defaults, 0 and 0, make plain LRU; ours let a conversation lose its last 1,536 tokens.
    """

    name: str = "tlru"

    def __init__(self, menu: Menu, threshold_tokens: int = 2048, prompt_tokens: int = 512) -> None:
        super().__init__(menu)
        for what, number in (("threshold_tokens", threshold_tokens), ("prompt_tokens", prompt_tokens)):
            if number < 0:
                raise ValueError(f"{what} is {number}: expected 0 or more")
        self._slack = threshold_tokens - prompt_tokens
        self._history: dict[int, int] = {}
        self._parents: dict[int, int | None] = {}

    def key(self, candidate: Candidate) -> float:
        return float(candidate.depth_tokens < self._history[candidate.id] - self._slack)

    def used(self, candidate: Candidate) -> None:
        end = max(self._history.get(candidate.id, 0), candidate.depth_tokens + candidate.num_tokens)
        self._history[candidate.id] = end
        self._parents[candidate.id] = node = candidate.parent_id
        while node is not None and self._history.get(node, end) < end:
            self._history[node] = end
            node = self._parents[node]

    def left(self, candidate: Candidate, tier: int) -> None:
        if tier == DROPPED:
            del self._history[candidate.id], self._parents[candidate.id]
