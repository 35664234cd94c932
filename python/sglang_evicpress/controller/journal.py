"""Journal of decisions and their inputs: a bounded log, put into words only when it is read."""

from __future__ import annotations

import hashlib
from collections import deque
from itertools import islice
from typing import NamedTuple

from sglang_evicpress.core import Decision

JOURNAL_LENGTH = 4096
MOST_ABOUT = 200  # entries that one node's description has


class Entry(NamedTuple):
    """``number`` counts from 1 without gaps. ``now_s`` is the logical time, equal on every rank; ``value_of_hit``
    what one hit was worth then (``reuse``), the unit of the decision's weight and loss; ``cause``: of a drop, why.
    ``alpha`` is what quality was weighed by then, None where it is not. ``occasion``: why it was
    decided then, "" if nobody said."""

    number: int
    now_s: float
    value_of_hit: float
    decision: Decision
    cause: str = ""
    alpha: float | None = None
    occasion: str = ""


class Journal:
    """Append-only; the oldest entries go when it is full. Adding one costs the same however many there are.

    ``lost`` sums the losses of all that was ever added, each in hits of its time; gains count against it.
    """

    def __init__(self, length: int = JOURNAL_LENGTH) -> None:
        self._entries: deque[Entry] = deque(maxlen=length)
        self._num_added = 0
        self._regrets: dict[int, float] = {}
        self.lost = 0.0

    @property
    def next_number(self) -> int:
        """That of the entry that is added next."""
        return self._num_added + 1

    def add(
        self,
        decision: Decision,
        now_s: float,
        value_of_hit: float,
        cause: str = "",
        alpha: float | None = None,
        occasion: str = "",
    ) -> None:
        self._num_added += 1
        self.lost += decision.loss / value_of_hit
        if len(self._entries) == self._entries.maxlen:
            self._regrets.pop(self._entries[0].number, None)
        self._entries.append(Entry(self._num_added, now_s, value_of_hit, decision, cause, alpha, occasion))

    def regret(self, number: int | None, seconds: float) -> None:
        """Note that what the entry dropped was asked for again, and takes so long to recompute."""
        if number is not None and self._entries and self._entries[0].number <= number <= self._num_added:
            self._regrets[number] = self._regrets.get(number, 0.0) + seconds

    def read(self, since: int, limit: int) -> dict[str, object]:
        """Up to ``limit`` entries with numbers above ``since``, oldest first.

        ``last`` is the number to ask for the following ones with, ``next`` the same, None where there are none yet;
        ``num_lost`` says how many entries above ``since`` were there once and had to make room.
        """
        first = self._num_added - len(self._entries) + 1
        skipped = max(0, since + 1 - first)
        entries = list(islice(self._entries, skipped, skipped + limit))
        return {
            "num_decisions": self._num_added,
            "num_lost": max(0, first - 1 - since),
            "last": entries[-1].number if entries else self._num_added,
            "next": entries[-1].number if entries and entries[-1].number < self._num_added else None,
            "entries": [self._described(entry) for entry in entries],
        }

    def digest(self) -> bytes:
        """A digest of the entries that are still there."""
        hashed = hashlib.sha256()
        for entry in self._entries:
            hashed.update(repr(entry).encode())
        return hashed.digest()

    def about(self, node_id: int) -> list[dict[str, object]]:
        """The entries that are still there of one node, oldest first: at most the last ``MOST_ABOUT``."""
        entries = (entry for entry in reversed(self._entries) if entry.decision.node_id == node_id)
        return [self._described(entry) for entry in islice(entries, MOST_ABOUT)][::-1]

    def _described(self, entry: Entry) -> dict[str, object]:
        """An entry as a JSON object; weight and loss in hits of that time."""
        decision, loss = entry.decision, entry.decision.loss / entry.value_of_hit
        verb = "gains" if loss < 0 else "loses"
        described = {
            "number": entry.number,
            "time_s": entry.now_s,
            "node_id": decision.node_id,
            "kind": decision.kind,
            "from": str(decision.source),
            "to": str(decision.option),
            "bytes_before": decision.source.num_bytes,
            "bytes": decision.option.num_bytes,
            "freed_bytes": decision.freed_bytes,
            "weight": decision.weight / entry.value_of_hit,
            "quality_before": decision.quality_before,
            "quality": decision.quality,
            "delay_before_s": decision.delay_before_s,
            "delay_s": decision.delay_s,
            "loss": loss,
            "reason": f"{decision.option}: {verb} {abs(loss):.4g} over {decision.freed_bytes} bytes",
        }
        if entry.occasion:
            described["occasion"] = entry.occasion
        if entry.alpha is not None:
            described["alpha"] = entry.alpha
        if entry.cause:
            described |= {"cause": entry.cause, "regret_s": self._regrets.get(entry.number, 0.0)}
        return described
