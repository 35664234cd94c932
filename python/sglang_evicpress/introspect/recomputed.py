"""Recomputed tokens by reason, counted when a request is admitted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MOST_DROPS = 16384
"""Drops that are remembered, the last ones: some 4 MB."""

TAIL_TOKENS = 64
"""So many tokens before the first one that was dropped tell whose it was, with its place and the next page."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Tokens dropped: ``num_tokens`` which take ``recompute_s`` to compute, for ``reason``; ``number`` is that of
    the decision in the journal, None where there was none; ``had_room``: a lower tier could have held it."""

    num_tokens: int
    recompute_s: float
    reason: str
    had_room: bool
    number: int | None = None


@dataclass(slots=True)
class DropCounts:
    """Counts of one reason: tokens dropped, and how many of them were asked for again."""

    nodes: int = 0
    tokens: int = 0
    missed_tokens: int = 0
    missed_s: float = 0.0


class Recomputed:
    """Bounded, and pure but for its counters. ``computed`` holds tokens by reason; "new" ones nobody had."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.prompt_tokens = 0
        self.computed: Counter[str] = Counter()
        self.not_worth_s = {"load": 0.0, "predicted": 0.0}
        self.drops: dict[str, DropCounts] = {}
        self._remembered: OrderedDict[int, Drop] = OrderedDict()

    def drop(self, place: int, drop: Drop) -> None:
        """A node is dropped whose first token is at ``place``, see ``place_of``."""
        counts = self.drops.setdefault(drop.reason, DropCounts())
        counts.nodes += 1
        counts.tokens += drop.num_tokens
        self._remembered[place] = drop
        self._remembered.move_to_end(place)
        if len(self._remembered) > MOST_DROPS:
            self._remembered.popitem(last=False)

    def admit(self, num_tokens: int, num_cached: int) -> None:
        """A request is admitted: its prompt, and how much of that it takes from the cache."""
        self.num_requests += 1
        self.prompt_tokens += num_tokens
        self.computed["new"] += max(0, num_tokens - num_cached)

    def compute_again(self, reason: str, num_tokens: int) -> None:
        """So many tokens of a prompt that was admitted before are computed anew, for this reason."""
        self.computed[reason] += num_tokens

    def blame(self, reason: str, num_tokens: int) -> None:
        """So many tokens of those that were just counted as new are none: they are computed for this reason."""
        self.computed[reason] += num_tokens
        self.computed["new"] -= num_tokens

    def miss(self, tokens: Sequence[int], begin: int, namespace: str | None, page_size: int) -> list[Drop]:
        """The drops that a prompt misses, of which the cache knows ``begin`` tokens: each counted, and forgotten."""
        newly_missed = []
        while begin < len(tokens):
            before, page = tokens[max(0, begin - TAIL_TOKENS) : begin], tokens[begin : begin + page_size]
            drop = self._remembered.pop(place_of(before, page, begin, namespace), None)
            if drop is None:
                break
            missed = min(drop.num_tokens, len(tokens) - begin)
            counts = self.drops[drop.reason]
            counts.missed_tokens += missed
            counts.missed_s += drop.recompute_s * missed / max(1, drop.num_tokens)
            self.blame("dropped" if drop.had_room else "dropped_full", missed)
            newly_missed.append(drop)
            begin += drop.num_tokens
        return newly_missed

    def describe(self, not_worth_took_s: float = 0.0) -> dict[str, object]:
        """Counts as JSON. ``not_worth_s`` of what was not loaded: predicted seconds to load and to compute it, and the
        seconds that this took."""
        return {
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": dict(self.computed),
            "not_worth_s": {**self.not_worth_s, "actual": not_worth_took_s},
        }

    def describe_drops(self) -> dict[str, object]:
        return {reason: asdict(counts) for reason, counts in sorted(self.drops.items())}


def place_of(before: Sequence[int], page: Sequence[int], start: int, namespace: str | None) -> int:
    """A number that is the same for the same place in the same prompt, and seldom for others: for statistics only.

    ``before`` are the tokens before the place, of which the last ``TAIL_TOKENS`` count, ``page`` those of the first
    page behind it, and ``start`` is its position.
    """
    return hash((namespace, start, tuple(before[-TAIL_TOKENS:]), tuple(page)))
